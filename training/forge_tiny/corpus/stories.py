"""Short stories: one hero, one friend, one trouble, a good end.

The plots are in `texts/plots.txt`: a plot is a list of beats, and a beat is a template with
choices. Names and kinds are drawn once per story, so characters of the first sentence are still
there in the last.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .document import Document, article, blocks, capitalize, careless, chat, expand, plural, text

GIRLS = (
    "Lily Mia Anna Emma Sara Nora Ella Ruby Lucy Zoe Clara Amy Rosa Maya Ida Eva Alice Daisy "
    "Julia Nina Hana Leila Sofia Grace Ivy Olive Tara Wendy Molly Kate"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Jack Tim Finn Noah Oscar Hugo Adam Paul Peter Dan Owen Luca Omar Ravi "
    "Kofi Ivan Milo Theo Felix Jonas Liam Eli Hans Mark Nick"
).split()
PET_NAMES = (
    "Rex Bella Coco Buddy Biscuit Pepper Luna Spot Ginger Shadow Toffee Pip Waffles Daisy Rusty "
    "Bruno Mochi Patch Honey Scout Nutmeg Bubbles Sunny Snowy Fluffy Tiny Pickle Rolo Hazel Bonnie"
).split()
# kind: (home, food, movement, sound)
ANIMALS = {
    "dog": ("in a small house", "bones", "ran", "barked"),
    "puppy": ("in a warm basket", "biscuits", "ran", "barked"),
    "cat": ("in a cosy house", "fish", "crept", "meowed"),
    "kitten": ("in a soft basket", "milk", "crept", "meowed"),
    "rabbit": ("in a burrow under the hill", "carrots", "hopped", "squeaked"),
    "mouse": ("in a hole in the wall", "cheese", "scurried", "squeaked"),
    "bear": ("in a cave in the forest", "honey", "walked", "growled"),
    "fox": ("in a den in the woods", "berries", "trotted", "yelped"),
    "bird": ("in a nest in the old oak", "seeds", "flew", "sang"),
    "owl": ("in a hollow tree", "berries", "flew", "hooted"),
    "duck": ("by the pond", "bread", "waddled", "quacked"),
    "frog": ("near the pond", "flies", "hopped", "croaked"),
    "horse": ("on a farm", "apples", "galloped", "neighed"),
    "cow": ("on a green farm", "grass", "walked", "mooed"),
    "pig": ("on a muddy farm", "corn", "trotted", "grunted"),
    "sheep": ("in the meadow", "grass", "trotted", "bleated"),
    "goat": ("on the mountain", "leaves", "climbed", "bleated"),
    "squirrel": ("in a tall tree", "nuts", "jumped", "chattered"),
    "hedgehog": ("under the hedge", "apples", "crawled", "squeaked"),
    "elephant": ("near the river", "leaves", "walked", "trumpeted"),
    "lion": ("on the grassy plain", "meat", "walked", "roared"),
    "tiger": ("in the jungle", "meat", "crept", "roared"),
    "monkey": ("in the jungle", "bananas", "swung", "chattered"),
    "penguin": ("on the ice", "fish", "waddled", "squawked"),
    "turtle": ("by the lake", "leaves", "crawled", "whispered"),
    "dragon": ("in a cave on the mountain", "soup", "flew", "roared"),
    "wolf": ("in the dark forest", "meat", "ran", "howled"),
    "donkey": ("on a farm", "hay", "walked", "brayed"),
    "chicken": ("on a farm", "corn", "ran", "clucked"),
    "dolphin": ("in the blue sea", "fish", "swam", "whistled"),
    "robot": ("in a workshop", "sparks", "rolled", "beeped"),
}
_CHILDREN = {"girl": ("she", "her", "her", GIRLS), "boy": ("he", "him", "his", BOYS)}

_OPENING = (
    "[Once upon a time, there was|Once upon a time, there was|Once upon a time, there was|There "
    "once was|Long ago, there was|In a quiet village, there was|Not so long ago, there was|Far "
    "away, there was] "
)
_ANIMAL_HERO = _OPENING + (
    "[a|a|a little|a little|a small|a kind|a brave|a young|a cheerful|a clever|a shy|a curious] "
    "{kind} [named|named|called] {hero}. [{hero} lived {home}.|{He} lived {home} and loved "
    "[{food}|to play|to explore|sunny days].|{hero} lived {home} with {his} [family|mother"
    "|friends].|Every day, {hero} [played|sang|went for a walk] {near}.|{hero} was [kind to "
    "everyone|always happy|very friendly|full of ideas].] "
)
_CHILD_HERO = _OPENING + (
    "[a|a|a little|a kind|a brave|a young|a clever|a quiet|a curious] {child} [named|named"
    "|called] {hero}. [{hero} had {a_kind} [named|called] {pet}, and they [were best friends|did "
    "everything together|played every day].|{He} had [a small|a sweet|a funny|a gentle] {kind} "
    "[named|called] {pet}. [{hero} loved {pet} very much.|They were always together.|{pet} "
    "followed {him} everywhere.]] "
)
_GOOD_END = (
    " [From that day on, they were the best of friends.|They all lived happily ever after.|And "
    "they lived happily ever after.|It was the best day ever.|{hero} went to bed with a big "
    "smile.|That night, {hero} slept very well.|{hero} never forgot that day.|Everyone was happy."
    "|And that is how {hero} learned that {lesson}.|{hero} had learned that {lesson}.|{hero} was "
    "proud and happy.|The end.|After that, {hero} always remembered that {lesson}.]"
)


@dataclass(frozen=True)
class Plot:
    about: str  # completes "a story about a dog who ..."
    topic: str  # completes "a story about ..."
    lesson: str
    beats: tuple[str, ...]


_DAY = (
    "One [day|morning|afternoon|sunny day|sunny morning|cold morning|windy day|rainy day|spring "
    "day|summer day|autumn day], "
)


def _read_plot(lines: tuple[str, ...]) -> Plot:
    about, topic, lesson, *beats = lines
    return Plot(
        about.removeprefix("about: "),
        topic.removeprefix("topic: "),
        lesson.removeprefix("lesson: "),
        tuple(beat.replace("{day}", _DAY) for beat in beats),
    )


PLOTS = tuple(_read_plot(lines) for lines in blocks("plots"))

_WORDS = {
    "toy": "ball kite doll hat drum boat bell book scarf whistle key balloon".split(),
    "fear": "the dark;the deep water;thunder;high places;loud noises;the big forest".split(";"),
    "treat": "apples berries cookies nuts pears cherries carrots plums strawberries".split(),
    "skill": "swim;dance;sing;climb;whistle;paint;read;skate;cook;count".split(";"),
    "treasure": "golden ring;silver coin;little key;blue stone;music box;golden watch".split(";"),
    "sky": "moon stars rainbow".split(),
}
_PLACES = (
    ("to the forest", "in the forest"),
    ("to the river", "by the river"),
    ("to the park", "in the park"),
    ("to the old mill", "near the old mill"),
    ("to the meadow", "in the meadow"),
    ("to the beach", "on the beach"),
    ("up the hill", "on the hill"),
    ("to the lake", "by the lake"),
    ("to the garden", "in the garden"),
    ("to the old castle", "in the old castle"),
    ("to the market", "at the market"),
)


@dataclass(frozen=True)
class Story:
    content: str
    kind: str  # the animal in the story
    hero: str
    child: str  # "girl", "boy", or "" if the animal is the hero
    about: str
    topic: str


_SORT = "[|short |little |bedtime |nice |funny ]"
_ASK = "[Tell me|Tell me|Please tell me|Write|Write me|Can you tell me|Make up|Please write]"


def story(rng: random.Random) -> Story:
    plot = rng.choice(PLOTS)
    kind = rng.choice(("dog", "cat")) if rng.random() < 0.2 else rng.choice(tuple(ANIMALS))
    other = rng.choice([k for k in ANIMALS if k != kind])
    home, food, _, _ = ANIMALS[kind]
    child = "" if rng.random() < 0.6 else rng.choice(("girl", "boy"))
    he, him, his, names = _CHILDREN[child or rng.choice(("girl", "boy"))]
    hero = rng.choice(names if child or rng.random() < 0.3 else PET_NAMES)
    pet, buddy = rng.sample([n for n in PET_NAMES if n != hero], 2)
    buddy_he, _, buddy_his, _ = _CHILDREN[rng.choice(("girl", "boy"))]
    to_place, in_place = rng.choice(_PLACES)
    slots = {
        "hero": hero, "kind": kind, "a_kind": article(kind), "kinds": plural(kind), "home": home,
        "food": food,
        "child": child,
        "he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize(),
        "himself": "herself" if he == "she" else "himself", "pet": pet,
        "to_place": to_place, "in_place": in_place, "near": in_place,
        **{slot: rng.choice(words) for slot, words in _WORDS.items()},
    }  # fmt: skip
    # A child's own animal is the friend in need; an animal meets another one.
    if child:
        slots |= {"buddy": pet, "other": kind, "an_other": article(kind)}
    else:
        slots |= {"buddy": buddy, "other": other, "an_other": article(other)}
    slots |= {"buddy_he": buddy_he, "buddy_his": buddy_his}
    opening = _ANIMAL_HERO
    if child:
        opening = _CHILD_HERO if plot.about in _WITH_OWN_PET else _OPENING + _CHILD_MEETS
    slots["lesson"] = expand(rng, plot.lesson)
    beats = [opening.strip(), *plot.beats]
    content = " ".join(capitalize(expand(rng, beat, **slots).strip()) for beat in beats)
    content += " " + capitalize(expand(rng, _GOOD_END, **slots).strip())
    if rng.random() < 0.3:  # splits the story into paragraphs
        sentences = content.split(". ")
        middle = len(sentences) // 2
        content = ". ".join(sentences[:middle]) + ".\n\n" + ". ".join(sentences[middle:])
    about, topic = expand(rng, plot.about, **slots), expand(rng, plot.topic, **slots)
    return Story(content, kind, hero, child, about, topic)


_CHILD_MEETS = (
    "[a|a|a little|a kind|a brave|a young|a clever|a quiet|a curious] {child} [named|named"
    "|called] {hero}. [{hero} lived in a small [house|village|town].|{hero} liked [{kinds}"
    "|stories|to play outside].|{He} was [kind to everyone|always happy|very friendly].]"
)
# In the other plots the hero meets the animal for the first time.
_WITH_OWN_PET = {plot.about for plot in PLOTS if "an_other" not in "".join(plot.beats)} - {
    "helped an old neighbour",
    "found a {treasure}",
    "helped a friend in a storm",
    "learned to share",
}


def question_about(rng: random.Random, told: Story) -> tuple[str, str]:
    """Return a question that looks back at the story."""
    who = told.child or told.kind
    if rng.random() < 0.7:
        question = (
            "[What was the name of the {w}?|What was the {w} called?|What is the {w}'s name?]"
        )
        return expand(rng, question, w=who), f"The {who}'s name was {told.hero}."
    question = "[Thank you!|That was nice.|What a nice story!|I liked the story.|Lovely!]"
    return expand(
        rng, question
    ), "I am glad that you like it. Would you like to hear another story?"


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        told = story(rng)
        if rng.random() < 0.35:
            yield text(told.content)
            continue
        who = told.child or told.kind
        request = rng.choice(
            (
                "{ask} a story about {a_kind}.",
                "{ask} a story about {a_kind}.",
                "{ask} a story about {a_who}.",
                "{ask} a story about {a_kind} and a friend.",
                "{ask} a story about {a_who} who {about}.",
                "{ask} a story about {a_who} named {hero}.",
                "{ask} a story about {a_who} called {hero} who {about}.",
                "{ask} a story about {hero} the {who}.",
                "{ask} a story about {topic}.",
                "{ask} a story with {a_kind}.",
                "{ask} a story.",
                "A story about {a_kind}, please.",
                "I want to hear a story about {a_who}.",
                "Do you know a story about {a_kind}?",
                "Story about {a_kind}",
            )
        )
        prompt = expand(
            rng,
            request.replace("{ask} a story", f"{_ASK} a {_SORT}story"),
            a_kind=article(told.kind), a_who=article(who), who=who, about=told.about,
            hero=told.hero,
            topic=told.topic,
        )  # fmt: skip
        if prompt.startswith("Can you"):
            prompt = prompt[:-1] + "?"
        document = chat(careless(rng, prompt), told.content)
        if rng.random() < 0.25:
            question, answer = question_about(rng, told)
            document = Document((*document.turns, ("user", question), ("assistant", answer)))
        yield document
