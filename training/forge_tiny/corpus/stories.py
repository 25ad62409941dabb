"""Little stories: one hero, one friend, one trouble, a good end.

A plot is a list of beats; a beat is a template with choices. Names and kinds are drawn once per story,
so whoever is met in the first sentence is still there in the last.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .document import Document, article, capitalize, careless, chat, expand, text

GIRLS = (
    "Lily Mia Anna Emma Sara Nora Ella Ruby Lucy Zoe Clara Amy Rosa Maya Ida Eva Alice Daisy Julia Nina Hana"
    " Leila Sofia Grace Ivy Olive Tara Wendy Molly Kate"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Jack Tim Finn Noah Oscar Hugo Adam Paul Peter Dan Owen Luca Omar Ravi Kofi Ivan"
    " Milo Theo Felix Jonas Liam Eli Hans Mark Nick"
).split()
PET_NAMES = (
    "Rex Bella Coco Buddy Biscuit Pepper Luna Spot Ginger Shadow Toffee Pip Waffles Daisy Rusty Bruno Mochi"
    " Patch Honey Scout Nutmeg Bubbles Sunny Snowy Fluffy Tiny Pickle Rolo Hazel Bonnie"
).split()
# kind: (where it lives, what it eats, how it moves, what it says)
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
    "[Once upon a time, there was|Once upon a time, there was|Once upon a time, there was|There once was"
    "|Long ago, there was|In a quiet village, there was|Not so long ago, there was|Far away, there was] "
)
_ANIMAL_HERO = _OPENING + (
    "[a|a|a little|a little|a small|a kind|a brave|a young|a cheerful|a clever|a shy|a curious] {kind}"
    " [named|named|called] {hero}. "
    "[{hero} lived {home}.|{He} lived {home} and loved [{food}|to play|to explore|sunny days].|"
    "{hero} lived {home} with {his} [family|mother|friends].|Every day, {hero} [played|sang|went for a walk]"
    " {near}.|{hero} was [kind to everyone|always happy|very friendly|full of ideas].] "
)
_CHILD_HERO = _OPENING + (
    "[a|a|a little|a kind|a brave|a young|a clever|a quiet|a curious] {child} [named|named|called] {hero}. "
    "[{hero} had {a_kind} [named|called] {pet}, and they [were best friends|did everything together|played"
    " every day].|{He} had [a small|a sweet|a funny|a gentle] {kind} [named|called] {pet}. [{hero} loved"
    " {pet} very much.|They were always together.|{pet} followed {him} everywhere.]] "
)
_DAY = (
    "One [day|morning|afternoon|sunny day|sunny morning|cold morning|windy day|rainy day|spring day|summer day"
    "|autumn day], "
)
_GOOD_END = (
    " [From that day on, they were the best of friends.|They all lived happily ever after.|And they lived"
    " happily ever after.|It was the best day ever.|{hero} went to bed with a big smile.|That night, {hero}"
    " slept very well.|{hero} never forgot that day.|Everyone was happy.|And that is how {hero} learned that"
    " {lesson}.|{hero} had learned that {lesson}.|{hero} was proud and happy.|The end.|After that, {hero} always"
    " remembered that {lesson}.]"
)
_ASK = (
    '[asked {hero}|{hero} asked|{hero} said with a sad voice|{hero} called]'
)


@dataclass(frozen=True)
class Plot:
    about: str  # completes "a story about a dog who ..."
    topic: str  # completes "a story about ..."
    lesson: str
    beats: tuple[str, ...]


PLOTS = (
    Plot(
        "lost {his} {toy}",
        "a lost {toy}",
        "[good friends help each other|you should never give up|asking for help is a good idea]",
        (
            "{hero} [had|owned] a [red|blue|green|yellow|shiny|small] {toy}. [It was {his} favourite thing.|"
            "{He} took it everywhere.|{He} played with it every day.]",
            _DAY + "the {toy} was [gone|missing|nowhere to be found]. {hero} [was very sad|began to cry|felt"
            " terrible|did not know what to do].",
            "{He} looked [under the bed|behind the door|in the garden|under the table|in every box], but it was"
            " not there. [Then {he} looked [in the kitchen|near the gate|behind the tree], but found nothing.|]",
            '{buddy} [came by|saw {hero}|heard about it]. "[Do not worry|Don\'t be sad|Cheer up]," said {buddy}.'
            ' "[I will help you look.|Let us look together.|We will find it together.]"',
            "They [searched|looked] {near}. [At last|Finally|After a long time|Soon], {buddy} found the {toy}"
            " [under a bush|behind a big rock|in the tall grass|next to a tree|under some leaves].",
            '"[Thank you|Thank you so much|You found it]!" said {hero}. {He} [hugged {buddy}|jumped for joy|'
            "smiled from ear to ear|danced around].",
        ),
    ),
    Plot(
        "got lost {in_place}",
        "getting lost",
        "[there is always a way home|it is good to stay calm|strangers can become friends]",
        (
            _DAY + "{hero} [went|walked|wandered] {to_place}. [It was so pretty there that {he} forgot the time.|"
            "{He} followed a butterfly and did not look at the path.|{He} wanted to see something new.]",
            "[When {he} looked around|Soon|After a while], everything looked [strange|different|dark]. {hero} was"
            " [lost|all alone]. [{He} felt afraid.|{He} began to worry.|{His} heart beat fast.]",
            "[Then|Suddenly|Just then] {he} [met|saw] {an_other} named {buddy}. \"[Why are you so sad|What is"
            ' wrong|Are you lost]?" asked {buddy}.',
            '"[I cannot find my way home|I do not know the way home|I am lost]," said {hero}. "[Come with me|Follow'
            ' me|I know the way]," said {buddy}. "[I can show you the path.|It is not far.|We can go together.]"',
            "They walked [past the river|over the bridge|through the trees|along the stream|up the hill]"
            " [and over the bridge|and past the old mill|until the stars came out|side by side|and sang songs].",
            "[At last|Finally|Soon], {hero} saw {his} home. {He} [thanked {buddy} with all {his} heart|gave {buddy}"
            " a big hug|invited {buddy} to dinner].",
        ),
    ),
    Plot(
        "was afraid of {fear}",
        "being brave",
        "[being brave means trying even when you are afraid|it is fine to be afraid|friends make us brave]",
        (
            "{hero} was [afraid|very afraid|scared] of {fear}. [The others laughed at {him}.|{He} did not tell"
            " anyone.|It made {him} sad.|{He} wished to be brave.]",
            _DAY + "{he} heard a small voice. It was {buddy} the {other}. {buddy} was [stuck|trapped|in trouble]"
            " {in_place}, and {hero} was the only one who could help.",
            "{hero} thought of {fear}. {His} legs [shook|trembled]. But {buddy} [needed help|was all alone|was"
            " calling again], so {hero} took a deep breath.",
            "[Step by step|Slowly|Very carefully], {he} went {to_place}. {He} [pulled|helped] {buddy} out and"
            " brought {buddy} home.",
            '"You are [so brave|the bravest of all|a real hero]," said {buddy}. {hero} [smiled|was surprised|felt'
            " warm inside]. {He} was not so afraid any more.",
        ),
    ),
    Plot(
        "wanted a friend",
        "friendship",
        "[friends can be very different|a friend can be found anywhere|a kind word opens every door]",
        (
            "{hero} [had no one to play with|was lonely|often felt alone]. {He} wished for a friend.",
            _DAY + "{he} went {to_place}. There {he} [saw|met] {an_other}. The {other} [looked lonely, too|was"
            " sitting all alone|was crying].",
            '"Hello," said {hero}. "[My name is {hero}. What is your name?|I am {hero}. Who are you?]" "[I am'
            ' {buddy}|My name is {buddy}]," said the {other}.',
            '"[Would you like to play with me|Do you want to play|Shall we play together]?" asked {hero}. {buddy}'
            " [nodded|smiled|said yes at once].",
            "They [played hide and seek|built a house of sticks|told each other stories|shared some {food}|ran"
            " and laughed|made a crown of flowers] until the sun went down.",
            '"[Will you come back tomorrow|Can we play again tomorrow]?" asked {buddy}. "[Of course|Yes]," said'
            ' {hero}. "[We are friends now.|I will come every day.|Friends always come back.]"',
        ),
    ),
    Plot(
        "learned to share",
        "sharing",
        "[sharing makes everything better|there is enough for everyone|it feels good to share]",
        (
            "{hero} had a [big|huge|full] basket of {treat}. {He} [wanted to keep it all|did not want to share|hid"
            " it from everyone].",
            _DAY + "{buddy} the {other} came by. \"[I am so hungry|I have had nothing to eat today]. May I have"
            ' [some|a few] {treat}?" asked {buddy}.',
            '"[No|No, they are mine|Go away]," said {hero}. {buddy} [walked away sadly|said nothing and left|hung'
            " {buddy_his} head].",
            "{hero} ate and ate, but [the {treat} did not taste good|it was no fun to eat alone|{he} felt bad"
            " inside]. {He} thought of {buddy}.",
            "So {he} [ran|hurried] after {buddy}. \"[I am sorry|Wait|Please come back],\" said {hero}. \"[Let us eat"
            ' together.|You can have half.|I want to share with you.]"',
            "They sat [under a tree|in the sun|by the fire] and ate the {treat} together. [Now they tasted much"
            " better.|They laughed and talked all day.]",
        ),
    ),
    Plot(
        "planted a seed",
        "a garden",
        "[good things take time|patience is worth it|small things can grow big]",
        (
            _DAY + "{hero} found a [tiny|small|strange] seed {in_place}. \"[I will plant it|I wonder what it will"
            ' become]," said {hero}.',
            "{He} put the seed in the ground and gave it water. [The next day, nothing had happened.|{He} waited,"
            " but nothing happened.|{He} looked at it every hour.]",
            '"[It will never grow|Nothing is happening]," said {hero}. {buddy} the {other} [smiled|laughed'
            ' softly]. "[Be patient|Wait a little|Give it time]," said {buddy}.',
            "So {hero} [waited|gave it water every day|sang to it every morning]. [It rained, and the sun came"
            " out.|Days went by.|A week went by.]",
            "[At last|Then one morning|Finally], a [green leaf|small green plant] came out of the ground. It grew"
            " and grew until it was a [tall sunflower|big apple tree|beautiful rose|huge pumpkin].",
            "{hero} [called all {his} friends|danced around it|showed it to {buddy}], and they [sat in its shade|"
            "had a party|admired it together].",
        ),
    ),
    Plot(
        "learned to {skill}",
        "learning to {skill}",
        "[practice makes you better|you must not give up|everyone falls before they succeed]",
        (
            "{hero} wanted to learn to {skill}. [All {his} friends could do it already.|It looked so easy.|{He}"
            " dreamed of it every night.]",
            _DAY + "{he} tried for the first time. {He} [fell down|failed|made a big mess]. {He} tried again, and"
            " [failed|fell] again. \"I [cannot do it|will never learn it],\" {he} said.",
            '{buddy} the {other} was watching. "[I could not do it at first, either|Nobody can do it the first'
            ' time]," said {buddy}. "[Try once more.|Let me help you.|I will show you how.]"',
            "[Every day|Day after day|Every morning], they practised together {in_place}. [Slowly, it got"
            " better.|Each day, it was a little easier.]",
            "[Then one day|At last|One bright morning], {hero} [did it|could do it]! {He} could {skill} [all by"
            " {himself}|as well as anyone|without any help].",
            '"[Look at me|I can do it|I did it]!" {he} [shouted|cried|called]. {buddy} [clapped|cheered|was very'
            " proud].",
        ),
    ),
    Plot(
        "helped an old neighbour",
        "helping others",
        "[helping others makes you happy|kindness comes back|a small help can mean a lot]",
        (
            "Near {hero} lived an old {other} named {buddy}. [Everyone said that {buddy} was grumpy.|{buddy} was"
            " often tired.|{buddy} lived all alone.]",
            _DAY + "{hero} saw that {buddy} [could not carry the firewood|had hurt {buddy_his} foot|was too tired"
            " to fetch water|could not fix the broken roof].",
            '"[Let me help you|May I help you|I can do that for you]," said {hero}. {buddy} was [surprised|very'
            ' glad]. "[Nobody ever asked me that|How kind of you]," said {buddy}.',
            "{hero} worked [all morning|until noon|very hard]. [Then {he} made some hot soup for {buddy}.|Then"
            " they sat by the fire.|{He} even swept the floor.]",
            "{buddy} told {him} [wonderful stories|stories of faraway lands|the funniest jokes] and gave {him}"
            " [a warm cake|some sweet {treat}|an old golden button].",
            "[After that|From then on], {hero} visited {buddy} [every day|every week|every Sunday].",
        ),
    ),
    Plot(
        "found a {treasure}",
        "a {treasure}",
        "[it is right to give things back|being honest is worth more than gold]",
        (
            _DAY + "{hero} was [playing|walking|digging] {in_place} when {he} found a {treasure}. It [shone in the"
            " sun|was old and beautiful|sparkled like a star].",
            '"[How wonderful|What a lucky day]!" said {hero}. [{He} wanted to keep it.|{He} put it in {his} bag.]'
            " [But then|Then] {he} thought that someone might [miss it|be looking for it].",
            "So {he} asked everyone {near}. \"[Is this yours|Did you lose this]?\" {he} asked. [The baker|The farmer|"
            "The miller] [shook {buddy_his} head|said no], and so did [the postman|the teacher|the fisherman].",
            "[At last|Finally], {he} came to {buddy} the {other}, who was [crying|very sad]. \"[That is my"
            ' {treasure}|Oh, you found my {treasure}]!" said {buddy}. "[My grandmother gave it to me.|I have'
            ' looked for it everywhere.]"',
            "{hero} gave it back. {buddy} was so [happy|thankful] that {buddy_he} [baked a big cake|gave {hero} a"
            " basket of {treat}|invited {hero} to a feast].",
        ),
    ),
    Plot(
        "helped a friend in a storm",
        "a storm",
        "[we are stronger together|a warm home is for sharing|every storm comes to an end]",
        (
            _DAY + "dark clouds [came over the hills|filled the sky]. The wind [blew|howled] and it began to"
            " [rain|snow]. {hero} [ran|hurried] home and closed the door.",
            "[Then|Suddenly] {he} heard a knock. It was {buddy} the {other}, [wet and cold|shaking with cold].",
            '"[The storm took my house|The wind broke my roof|I have nowhere to go]," said {buddy}. "[Come in|Come'
            ' inside, quickly]," said {hero}. "[You can stay with me.|There is room for two.]"',
            "{hero} made [hot soup|warm tea|a big fire] and gave {buddy} a [soft|thick|warm] blanket. They"
            " [listened to the rain|told stories|played games] all night.",
            "[In the morning|The next day], the sun was shining [and there was a rainbow|again]. Together they"
            " [built a new house for {buddy}|fixed the roof|cleaned up everything].",
        ),
    ),
    Plot(
        "wanted to win a race",
        "a race",
        "[winning is not everything|it is better to help than to win|a good heart is worth more than a prize]",
        (
            "[Every year|Every spring], there was a big race {in_place}. {hero} [wanted to win|had trained for"
            " weeks|dreamed of the golden cup].",
            "[The day of the race came|At last the day came]. \"[Ready, steady, go|One, two, three, go]!\" called"
            " the [owl|teacher|old goat]. {hero} was [fast|in front|the first at the bridge].",
            "[Then|Suddenly] {he} saw {buddy} the {other}, who had [fallen|hurt {buddy_his} leg|slipped in the"
            " mud]. [Everyone ran past.|Nobody stopped.]",
            "{hero} [stopped|turned around|did not think twice] and [helped {buddy} up|carried {buddy}|gave {buddy}"
            " {his} hand]. Together, they [walked|went] slowly to the end. They were the last.",
            "But [everyone|the whole village|all the others] cheered [for them|louder than ever]. {hero} did not"
            " get the cup, but [{he} got a new friend|{buddy} gave {him} a flower|{he} felt like a winner].",
        ),
    ),
    Plot(
        "made a surprise for a birthday",
        "a birthday",
        "[the best gifts come from the heart|thinking of others is the best gift]",
        (
            "It was [almost|soon] {buddy}'s birthday. {buddy} the {other} was {hero}'s [best friend|dear friend],"
            " but {hero} had no [money|present].",
            '"[What can I give|What would make {buddy} happy]?" {hero} thought [all day|all night].',
            _DAY + "{he} had an idea. {He} [baked a cake with {treat}|painted a picture|made a kite out of paper|"
            "wrote a song] [all by {himself}|in secret].",
            "[It was not easy.|It took a long time.|{He} worked very hard.] [First it went wrong, but {he} tried"
            " again.|The first try was a mess, but the second one was lovely.]",
            'On the birthday, {hero} [called all the friends|hung up lights]. "[Surprise|Happy birthday]!" they'
            " shouted. {buddy} [cried with joy|could not believe it|laughed with happiness].",
            '"[This is the best present|Nobody ever made me such a gift]," said {buddy}. They [danced|sang|ate'
            " cake] until [late at night|the moon came up].",
        ),
    ),
    Plot(
        "wanted to touch the {sky}",
        "the {sky}",
        "[dreams are worth following|the best things are close to us|it is fun to dream together]",
        (
            "[Every night|Every evening], {hero} looked up at the {sky}. \"[How beautiful|I want to touch it],\""
            " {he} said.",
            _DAY + "{he} [climbed the highest hill|climbed the tallest tree|built a long ladder], but the {sky} was"
            " still [too far away|so far away].",
            "{buddy} the {other} asked, \"[What are you doing up there|Why do you climb so high]?\" \"[I want to"
            ' touch the {sky}|I want to bring home the {sky}]," said {hero}.',
            '{buddy} [thought for a while|smiled]. "[Come with me|I will show you something]," said {buddy}. They'
            " went to the [lake|pond|river], and there in the water was the {sky}, [bright and clear|shining].",
            "{hero} [put a hand in the water|touched the water softly], and the light [danced|sparkled] around"
            " {him}. \"I [touched it|did it]!\" {he} [laughed|whispered].",
        ),
    ),
    Plot(
        "could not sleep",
        "bedtime",
        "[a friend makes the night short|kind words bring sweet dreams]",
        (
            "[One night|Late one night], {hero} could not sleep. {He} [turned left and right|counted to one hundred|"
            "drank a cup of milk], but {his} eyes stayed open.",
            "{He} [went|tiptoed] outside, where the [moon|stars] [shone|were shining]. There {he} met {buddy} the"
            " {other}. \"[Why are you awake|Can't you sleep]?\" asked {buddy}.",
            '"[No|I am thinking too much|The night is too quiet]," said {hero}. "[Let us look at the stars|Listen to'
            ' the wind|Let me tell you a story]," said {buddy}.',
            "They sat [close together|on the soft grass|on a log] and [counted the stars|listened to the wind in"
            " the trees|talked in quiet voices].",
            "[Soon|After a while], {hero} began to yawn. {His} eyes [grew heavy|slowly closed]. {buddy} [took {him}"
            " home|covered {him} with leaves|whispered good night].",
        ),
    ),
)

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
    kind: str  # the animal in it
    hero: str
    child: str  # "girl", "boy" or "" where the animal is the hero
    about: str
    topic: str


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
        "hero": hero, "kind": kind, "a_kind": article(kind), "home": home, "food": food, "child": child,
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
    if rng.random() < 0.3:  # in paragraphs
        sentences = content.split(". ")
        middle = len(sentences) // 2
        content = ". ".join(sentences[:middle]) + ".\n\n" + ". ".join(sentences[middle:])
    about, topic = expand(rng, plot.about, **slots), expand(rng, plot.topic, **slots)
    return Story(content, kind, hero, child, about, topic)


_CHILD_MEETS = (
    "[a|a|a little|a kind|a brave|a young|a clever|a quiet|a curious] {child} [named|named|called] {hero}."
    " [{hero} lived in a small [house|village|town].|{hero} liked [{kind}s|stories|to play outside].|{He} was"
    " [kind to everyone|always happy|very friendly].]"
)
# In the other plots the hero meets the animal for the first time.
_WITH_OWN_PET = {plot.about for plot in PLOTS if "an_other" not in "".join(plot.beats)} - {
    "helped an old neighbour",
    "found a {treasure}",
    "helped a friend in a storm",
    "learned to share",
}


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
        ask = "[Tell me|Tell me|Please tell me|Write|Write me|Can you tell me|Make up|Please write]"
        ask += "[| a short| a little]" if False else ""
        prompt = expand(
            rng,
            request.replace("{ask} a story", ask + " a [|short |little |bedtime |nice |funny ]story"),
            a_kind=article(told.kind), a_who=article(who), who=who, about=told.about, hero=told.hero,
            topic=told.topic,
        )  # fmt: skip
        if prompt.startswith("Can you"):
            prompt = prompt[:-1] + "?"
        yield chat(careless(rng, prompt), told.content)
