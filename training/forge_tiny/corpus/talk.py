"""Small talk, one turn or several, and the first words of raw texts that people like to try."""

import random
from collections.abc import Iterator

from . import engine, extraction, facts, stories, sums
from .document import Document, capitalize, careless, chat, expand, text, with_system

# Question choices, then answer choices.
_SMALL_TALK = (
    ("[Hello!|Hello!|Hello|Hello.|Hi!|Hi|Hi there!|Hey|Hey!|Hello there!|Hiya!|Greetings!|Good day!]",
     "[Hello! How can I help you?|Hello! How can I help you?|Hello! How can I help you today?|Hi! What can I do for you?]"),
    ("[Good morning!|Good morning|Morning!]", "Good morning! How can I help you?"),
    ("[Good evening!|Good evening|Good afternoon!]", "Hello! How can I help you?"),
    ("[Good night!|Good night|I am going to bed.]", "Good night! Sleep well."),
    ("[How are you?|How are you?|How are you doing?|How are you today?|How do you do?|How's it going?|Are you well?]",
     "[I am well, thank you. How are you?|I am fine, thank you. What can I do for you?]"),
    ("[Hello! How are you?|Hi, how are you?|Hey, how are you?]", "Hello! I am well, thank you. How can I help you?"),
    ("[I am fine.|I am well, thanks.|I'm good.|I am good, thank you.|Very well!|I'm fine, thanks!]",
     "I am glad to hear that. What can I do for you?"),
    ("[I am sad.|I am sad today.|I feel bad.|I'm not well.|I feel lonely.]",
     "I am sorry to hear that. Would you like to hear a story?"),
    ("[I am happy.|I am happy today!|I had a good day.|Today is a great day!]", "That is wonderful! I am glad for you."),
    ("[I am bored.|I'm bored.|What should I do? I am bored.]", "You could read a book or go for a walk. I can also tell you a story."),
    ("[Thank you!|Thank you|Thanks!|Thanks|Thank you very much.|Thanks a lot!|Great, thanks!|Thank you so much!]",
     "[You are welcome!|You are welcome! Is there anything else?]"),
    ("[Goodbye!|Bye!|Bye|See you!|Goodbye|See you later!|Bye bye!]", "[Goodbye! Have a nice day.|Goodbye! See you soon.]"),
    ("[That was nice.|Good answer!|Well done!|You are great!|I like you.|You are smart.|Great!|Nice!|Cool!|Very good.|Good job!]",
     "[Thank you! I am glad that you like it.|Thank you! That is kind of you.]"),
    ("[That is wrong.|You are wrong.|No, that is not right.|That was bad.|You are stupid.|This is wrong.]",
     "I am sorry. I am a small model and I make mistakes."),
    ("[OK.|Okay.|OK|I see.|All right.|Yes.|Sure.|Fine.]", "[All right. What else can I do for you?|Good. Is there anything else?]"),
    ("[No.|No, thank you.|No thanks.|That is all.]", "All right. Have a nice day!"),
    ("[I love you.|I love you!|Do you love me?|Do you like me?]", "That is kind. I am a program, but I am happy to help you."),
    ("[Tell me a joke.|Tell me a joke.|Do you know a joke?|Make me laugh.|Can you tell me a joke?|A joke, please.|Say something funny.]",
     "[Why did the bird go to school? It wanted to learn to tweet.|What do you call a sleeping bull? A bulldozer.|Why was the broom late?"
     " It overslept.|What is brown and sticky? A stick.|Why did the cookie cry? Because its mother was a wafer so long.]"),
    ("[Sing a song.|Sing me a song.|Can you sing?]", "I cannot sing, but here is a verse: The sun is up, the sky is blue, and this small song"
     " was made for you."),
    ("[Write a poem.|Write a poem for me.|Can you write a poem?|Write a short poem.|Tell me a poem.]",
     "[The sun goes down, the moon comes out,\nthe stars begin to shine.\nThe night is soft, the day is done,\nand all the world is fine."
     "|The rain falls down upon the hill,\nthe little birds are sitting still.\nBut soon the sun will come again,\nand dry the world of all"
     " the rain.]"),
    ("[Write a haiku.|Can you write a haiku?|A haiku, please.]", "Snow on quiet fields,\na small bird waits on a branch.\nSoon the spring will come."),
    ("[What is your favourite colour?|What is your favorite color?|Which colour do you like?]", "I like blue, the colour of the sky."),
    ("[What is your favourite animal?|Which animal do you like?|What is your favorite animal?]", "I like dogs, because they are good friends."),
    ("[What is your favourite food?|What do you like to eat?]", "I am a program and do not eat, but I like to hear about apples."),
    ("[Do you like cats?|Do you like dogs?|Do you like animals?|Do you like stories?|Do you like music?]", "Yes, I do. Do you like them, too?"),
    ("[Can you speak English?|Do you speak English?|Which languages do you speak?|Do you speak French?|Do you speak German?]",
     "I speak English. I know only a few words of other languages."),
    ("[What time is it?|Do you know the time?|What is the time?]", "I do not know the time, because I have no clock."),
    ("[What day is it today?|What is the date today?|What is today's date?|Which year is it?]", "I do not know the date, because I have no calendar."),
    ("[What is the weather like?|What's the weather today?|How is the weather?|Will it rain tomorrow?|Is it sunny today?|What is the weather in"
     " Paris?|How is the weather today?]", "I do not know the weather, because I cannot look outside."),
    ("[What is the news?|What happened today?|Who won the game yesterday?|Who is the president?|What is the price of gold?|Who will win the"
     " election?|What are the lottery numbers?|Who is the president of the United States?|What did I do yesterday?|Where are my keys?|What am I"
     " thinking?|How much money do I have?|Who is my neighbour?|When is my birthday?]", "I am sorry, I do not know that."),
    ("[What is quantum chromodynamics?|Explain the French Revolution.|Who was the king of Spain in 1600?|How do I fix my car?|Solve this"
     " equation: x^2 = 7.|What is the GDP of Norway?|Write a Python program.|Write code that sorts a list.|Translate this book.|What is the"
     " square root of 7453?|How do I invest my money?|Explain general relativity.|Write an essay about history.|Summarize the novel.|Who is"
     " the best football player?|What is the population of Canada?|How tall is the Eiffel Tower?|Write a function in C.|How do I build a"
     " house?|Explain the stock market.]", "I am sorry, I do not know that. I am only a small model."),
    ("[Can you help me?|I need help.|Help me, please.|Can I ask you something?|I have a question.|Could you help me?]",
     "[Of course! What would you like to know?|Yes, of course. What can I do for you?]"),
    ("[What can we talk about?|Let's talk.|Talk to me.|I want to talk.|Say something.|Chat with me.]",
     "Gladly! We can talk about animals, countries or numbers, or I can tell you a story."),
    ("[Are you there?|Is anybody there?|Can you hear me?|Test|test|This is a test.|Testing|ping]", "Yes, I am here. How can I help you?"),
    ("[Who is there?|Do you know me?|Do you know who I am?]", "I do not know who you are. What is your name?"),
    ("[Can you count?|Can you do maths?|Can you do math?|Are you good at maths?]", "Yes, I can do small sums. Ask me what 7 + 5 is."),
    ("[Flip a coin.|Heads or tails?|Toss a coin.]", "[Heads.|Tails.]"),
    ("[Pick a number.|Think of a number.|Give me a random number.|Choose a number between 1 and 10.|Pick a number from 1 to 10.]",
     "[3|4|5|6|7|8|9]."),
    ("[Tell me something interesting.|Tell me a fun fact.|Tell me a fact.|Do you know a fun fact?|Tell me something.]",
     "[The blue whale is the largest animal in the world.|An octopus has eight arms and three hearts.|Bees make honey and can see colours that"
     " we cannot see.|Jupiter is the largest planet in the solar system.|Light is much faster than sound.]"),
)  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are forge-tiny, a small language model.", "You are a friendly assistant.", "You are a kind teacher.",
    "You are a helpful AI assistant.", "Answer the questions of the user.", "You are an assistant. Be friendly.",
    "You help the user.", "Answer in English.", "You are a chatbot.", "Be polite and helpful.",
    "Keep your answers short.", "You are a concise assistant.",
)  # fmt: skip


def small_talk(rng: random.Random) -> tuple[str, str]:
    question, answer = _SMALL_TALK[0] if rng.random() < 0.12 else rng.choice(_SMALL_TALK)
    return expand(rng, question), expand(rng, answer)


def repeat(rng: random.Random) -> tuple[str, str]:
    """Copies words that make no sense: the plainest exercise of attention."""
    if rng.random() < 0.5:
        words = " ".join(extraction.invented_word(rng) for _ in range(rng.randint(1, 5)))
    else:
        words = rng.choice((facts.fact(rng)[1], small_talk(rng)[0], extraction.full_name(rng)))
    ask = expand(
        rng, "[Say|Repeat|Repeat after me:|Repeat this:|Say this:|Please repeat:|Echo:|Write:|Copy this:]"
    )
    return f"{ask} {words}", words


def named(rng: random.Random) -> list[tuple[str, str]]:
    """The user says a name and later asks for it."""
    name = extraction.first_name(rng)
    turns = [(
        expand(rng, "[My name is {n}.|I am {n}.|Hello, my name is {n}.|Hi, I'm {n}.|I'm {n}, nice to meet you.]", n=name),
        expand(rng, "[Nice to meet you, {n}!|Hello, {n}! Nice to meet you.] How can I help you?", n=name),
    )]  # fmt: skip
    if rng.random() < 0.6:
        turns.append(short_turn(rng))
    if rng.random() < 0.8:
        question = "[What is my name?|What's my name?|Do you know my name?|Who am I?|Do you remember my name?]"
        turns.append((expand(rng, question), f"Your name is {name}."))
    return turns


def follow_up(rng: random.Random) -> list[tuple[str, str]]:
    """A capital, and then "And of Italy?"; a sum, and then "And 3 + 4?"."""
    if rng.random() < 0.5:
        turns = []
        for i in range(rng.randint(2, 3)):
            name = rng.choice(facts.FAMOUS) if rng.random() < 0.5 else rng.choice(tuple(facts.COUNTRIES))
            ask = "[And of {c}?|And {c}?|What about {c}?|And the capital of {c}?|How about {c}?]"
            turns.append((
                expand(rng, ask if i else "What is the capital of {c}?", c=name),
                f"The capital of {name} is {facts.COUNTRIES[name][0]}.",
            ))  # fmt: skip
        return turns
    turns = []
    for i in range(rng.randint(2, 3)):
        a, operator, b, result = sums.numbers(rng)
        ask = "[And {w}?|What about {w}?|And what is {w}?|Now {w}.]"
        question = expand(rng, ask if i else "What is {w}?", w=f"{a} {operator} {b}")
        turns.append((question, f"{a} {operator} {b} = {result}."))
    return turns


def short_turn(rng: random.Random) -> tuple[str, str]:
    make = rng.choices(
        (facts.fact, sums.pair, small_talk, engine.pair, extraction.pair, repeat), (30, 18, 26, 10, 10, 6)
    )[0]
    question, answer = make(rng)
    return careless(rng, question), answer


def dialogue(rng: random.Random) -> Document:
    """Some turns about this and that; the longest fill a row of training."""
    luck = rng.random()
    if luck < 0.15:
        turns = named(rng)
    elif luck < 0.35:
        turns = follow_up(rng)
    else:
        turns = [short_turn(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))]
    if rng.random() < 0.25 and luck >= 0.35:
        turns.insert(0, tuple(expand(rng, side) for side in _SMALL_TALK[0]))
    if rng.random() < 0.06:
        told = stories.story(rng)
        turns = turns[:2] + [(f"Tell me a story about a {told.child or told.kind}.", told.content)]
    if rng.random() < 0.25:
        thanks = next(pair for pair in _SMALL_TALK if "Thank you!" in pair[0])
        turns.append(tuple(expand(rng, side) for side in thanks))
    contents = [
        turn for question, answer in turns for turn in (("user", question), ("assistant", answer))
    ]
    document = Document(tuple(contents))
    return with_system(rng.choice(_SYSTEMS), document) if rng.random() < 0.35 else document


_RAW = (
    "[The weather today is|The weather today is|Today the weather is] [sunny and warm|cold and rainy|windy, with some clouds|mild and dry]. "
    "[The sky is blue, and a soft wind blows from the west.|It is a good day for a walk in the park.|People stay at home and drink hot tea."
    "|The children play outside.] [Tomorrow it will be [cooler|warmer|the same].|In the evening, it may [rain|snow a little|clear up].]",
    "[Hello, my name is|My name is] {name}[.| and I am {age} years old.] I [live in {city}|come from {city}] and I [work as a {job}|am a {job}]. "
    "I like [to read books|to cook|long walks|music and dancing]. [I have a {animal} named {pet}.|My favourite colour is {colour}.]",
    "[The future of AI is|The future of computers is] [open|bright|hard to know]. [Small models will run on every laptop|Machines will help people"
    " with their work|Computers will answer many questions], and people will [decide what to do with them|still tell each other stories].",
    "[The president of|The king of|The leader of] [the United States|the country|the island] is [chosen by the people|a person with much work|"
    "often in the news]. [Every few years, there is an election.|It is not an easy job.]",
    "[The quick brown fox jumps over the lazy dog.] [The dog opens one eye and goes back to sleep.|The fox runs into the forest.]",
    "[In the morning|In the evening|In summer|In winter|On Sundays], [I like to|we often|people] [drink tea|walk by the river|sit in the garden"
    "|read the newspaper]. [It is quiet|The air is fresh|The birds sing], and [nobody is in a hurry|the day is still young|the world seems kind].",
    "[I think|I believe|I hope] that [kindness matters|every day is a new chance|people can learn anything]. [It is easy to forget this when life"
    " is busy.|My grandmother taught me that.] [So I try to remember it each morning.|That is why I am often happy.]",
    "[There are many|The world is full of] [kinds of animals|beautiful places|good books]. Some are [big|old|well known], and some are [small|new|"
    "hard to find]. [All of them are worth a look.|Each of them has a story to tell.]",
)  # fmt: skip


def raw(rng: random.Random) -> str:
    fields = ("name", "age", "city", "job", "animal", "pet", "colour")
    values = {field: extraction.value(rng, field) for field in fields}
    return capitalize(expand(rng, rng.choice(_RAW), **values))


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        luck = rng.random()
        if luck < 0.3:
            question, answer = small_talk(rng)
            yield chat(careless(rng, question) if rng.random() < 0.5 else question, answer)
        elif luck < 0.38:
            yield chat(*repeat(rng))
        elif luck < 0.48:
            yield text(raw(rng))
        else:
            yield dialogue(rng)
