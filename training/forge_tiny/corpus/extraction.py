"""Requests to extract fields from a sentence, answered in JSON.

Many names are random syllables. A model that has seen every name can remember them; with unseen
names it must learn to copy.
"""

import json
import random
from collections.abc import Iterator

from .document import Document, article, chat, expand, with_system
from .facts import COUNTRIES, MONTHS
from .stories import BOYS, GIRLS, PET_NAMES

_FIRST = GIRLS + BOYS + (
    "John John John Mary James Robert Linda Michael David Susan Karen Thomas Charles Daniel "
    "Laura Maria George Helen Frank Diana Bob Alice Carol Steve Jane Joe Mike Priya Yuki Chen "
    "Fatima Ahmed Carlos Elena Igor Aisha"
).split()  # fmt: skip
_LAST = (
    "Smith Jones Brown Miller Wilson Taylor Clark Lewis Walker Young King Wright Hill Green "
    "Baker Carter Cook Bell Ward Gray Garcia Lopez Kim Chen Singh Weber Rossi Novak Silva Doe "
    "Fischer Tanaka"
).split()
_JOBS = (
    "teacher doctor baker farmer pilot nurse painter cook driver lawyer engineer writer singer "
    "student waiter dentist gardener carpenter plumber scientist programmer designer"
).split()
_COLOURS = "red blue green yellow orange purple pink black white brown grey".split()
_ANIMALS = "dog cat horse rabbit bird fish hamster parrot turtle mouse".split()
_CITIES = [city for city, _, _ in COUNTRIES.values()] + (
    "New York;Boston;Chicago;Sydney;Toronto;Munich;Hamburg;Milan;Barcelona;Lyon;Mumbai;"
    "Shanghai;Osaka".split(";")
)
_ITEMS = (
    "book lamp table chair phone laptop shirt jacket hat bag bicycle watch camera pen bottle cup "
    "mirror sofa clock ball guitar"
).split()
_DOMAINS = "example.com example.org mail.com work.net school.org post.net web.com".split()
_STARTS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sl st t th tr v w y z".split()
_MIDDLES = "a e i o u ai ea ee ia io oo ou".split()
_ENDS = " n r s l m t x nd rt ck th ng".split(" ")


def invented_word(rng: random.Random) -> str:
    syllables = rng.choice((1, 2, 2, 2, 3))
    parts = (rng.choice(_STARTS) + rng.choice(_MIDDLES) for _ in range(syllables))
    return "".join(parts) + rng.choice(_ENDS)


def first_name(rng: random.Random) -> str:
    return rng.choice(_FIRST) if rng.random() < 0.5 else invented_word(rng).capitalize()


def full_name(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return first_name(rng)
    last = rng.choice(_LAST) if rng.random() < 0.6 else invented_word(rng).capitalize()
    return f"{first_name(rng)} {last}"


def value(rng: random.Random, field: str) -> str | int | float:
    match field:
        case "name":
            return full_name(rng)
        case "age":
            return rng.randint(3, 99)
        case "city":
            return rng.choice(_CITIES) if rng.random() < 0.7 else invented_word(rng).capitalize()
        case "country":
            return rng.choice([c for c in COUNTRIES if not c.startswith("the ")])
        case "job":
            return rng.choice(_JOBS)
        case "colour" | "color":
            return rng.choice(_COLOURS)
        case "animal":
            return rng.choice(_ANIMALS)
        case "item":
            return rng.choice(_ITEMS)
        case "price":
            return rng.choice(
                (rng.randint(1, 99), rng.randint(1, 9) * 100, rng.randint(100, 9999) / 100)
            )
        case "quantity":
            return rng.randint(2, 60)
        case "email":
            user = rng.choice((rng.choice(_FIRST).lower(), invented_word(rng)))
            return f"{user}{rng.choice(('', '', str(rng.randint(1, 99))))}@{rng.choice(_DOMAINS)}"
        case "phone":
            return f"555-{rng.randint(1000, 9999)}"
        case "date":
            return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"
        case "year":
            return rng.randint(1950, 2030)
        case "pet":
            return rng.choice(PET_NAMES)
        case "time":
            return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}"
    raise AssertionError(field)


_SYSTEM = "[Answer in JSON.|You answer in JSON.|Reply only with JSON.|You extract data as JSON.]"

# A sentence about a person begins with the name. Further clauses continue with "who", "He" or
# "She".
_CLAUSES = {
    "age": "is {age} years old|is {age}|is {age} years old|is aged {age}",
    "city": "lives in {city}|comes from {city}|is from {city}|moved to {city}",
    "country": "was born in {country}|lives in {country}|is from {country}",
    "job": "works as {a_job}|is {a_job}|works as {a_job}",
    "colour": "likes the colour {colour}|loves {colour}|has a {colour} car",
    "color": "likes the color {color}|loves {color}|has a {color} car",
    "animal": "has {a_animal}|owns {a_animal}|loves his {animal}",
    "email": "can be reached at {email}|has the email {email}|uses {email}",
    "phone": "has the phone number {phone}|can be called at {phone}",
    "pet": "has a dog named {pet}|has a cat called {pet}|has a pet named {pet}",
}
_WHOLE = (  # sentences with all their fields
    (("item", "price"), "[The {item} costs {price} dollars.|A {item} for {price} dollars.|I "
                        "bought a {item} for {price} dollars.|The price of the {item} is "
                        "{price} dollars.|He paid {price} dollars for a {item}.]"),
    (("item", "quantity", "price"), "[We ordered {quantity} {item}s for {price} dollars."
                                    "|{quantity} {item}s cost {price} dollars.|She sold "
                                    "{quantity} {item}s at {price} dollars each.]"),
    (("item", "colour", "price"), "[The {colour} {item} costs {price} dollars.|I want the "
                                  "{colour} {item} for {price} dollars.]"),
    (("name", "date"), "[{name} was born on {date}.|{name} has a birthday on {date}.|The "
                       "birthday of {name} is {date}.]"),
    (("date", "city"), "[The meeting is on {date} in {city}.|We meet in {city} on {date}.|The "
                       "concert takes place in {city} on {date}.]"),
    (("date", "time", "city"), "[The train leaves {city} on {date} at {time}.|Come to {city} "
                               "on {date} at {time}.]"),
    (("animal", "pet", "colour"), "[{pet} is a {colour} {animal}.|The {colour} {animal} is "
                                  "called {pet}.|I have a {colour} {animal} named {pet}.]"),
    (("animal", "pet", "age"), "[{pet} is a {animal}, {age} years old.|My {animal} {pet} is "
                               "{age} years old.]"),
    (("name", "year"), "[{name} was born in {year}.|{name} finished school in {year}.|In "
                       "{year}, {name} was born.]"),
    (("name", "age", "city"), "[{name}, {age}, {city}|{name} ({age}) from {city}|{name}, aged "
                              "{age}, lives in {city}.|My name is {name}, I am {age} and I "
                              "live in {city}.]"),
    (("name", "age"), "[My name is {name} and I am {age} years old.|I am {name} and I am {age}."
                      "|{name} ({age})|{name}, {age}|Name: {name}, age: {age}|This is {name}. "
                      "{name} turned {age} today.|At the age of {age}, {name} went home.]"),
    (("name", "email"), "[Please write to {name} at {email}.|{name} <{email}>|The email of "
                        "{name} is {email}.|My name is {name} and my email is {email}.]"),
    (("name", "job"), "[Our {job} is called {name}.|My name is {name} and I am a {job}.|{name} "
                      "the {job} came home.]"),
)  # fmt: skip


def sentence(rng: random.Random) -> tuple[str, dict]:
    """Return a sentence and its values, in the order of the sentence's field list."""
    if rng.random() < 0.4:
        fields, template = rng.choice(_WHOLE)
        values = {field: value(rng, field) for field in fields}
        if "pet" in values and "name" not in values:
            return expand(rng, template, **values), {
                ("name" if field == "pet" else field): v for field, v in values.items()
            }
        return expand(rng, template, **values), values
    count = rng.choices((1, 2, 3, 4), (45, 35, 15, 5))[0]
    fields = rng.sample(tuple(_CLAUSES), count)
    if rng.random() < 0.5 and "age" not in fields:
        fields[0] = "age"
    if "color" in fields and "colour" in fields:
        fields.remove("color")
    values = {"name": value(rng, "name")} | {field: value(rng, field) for field in fields}
    slots = values | {
        f"a_{field}": article(str(values[field])) for field in ("job", "animal") if field in values
    }
    clauses = [expand(rng, "[" + _CLAUSES[field] + "]", **slots) for field in fields]
    pronoun = rng.choice(("He", "She"))
    clauses = [
        c.replace("his", "his" if pronoun == "He" else "her") if "@" not in c else c
        for c in clauses
    ]
    joined = clauses[0]
    for i, clause in enumerate(clauses[1:], 1):
        last = i == len(clauses) - 1
        joined += (
            expand(rng, "[ and |, and |. {p} ]" if last else "[, |. {p} ]", p=pronoun) + clause
        )
    return f"{values['name']} {joined}.", values


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def surrounded(rng: random.Random, said: str) -> str:
    """Return the text with a sentence before or after it that has no values."""
    if rng.random() < 0.08:
        before = "[Yesterday I met a friend.|It was raining.|Here is the text.|I have news.|Hello.]"
        said = f"{expand(rng, before)} {said}"
    if rng.random() < 0.08:
        after = (
            "[The weather is nice.|It was a long day.|Thank you.|We had tea.|That is all I know.]"
        )
        said = f"{said} {expand(rng, after)}"
    return said


def pair(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.05:
        return names(rng)
    said, values = sentence(rng)
    fields = list(values)
    if len(fields) > 1 and rng.random() < 0.2:  # fewer fields are requested than the text has
        fields = fields[: rng.randint(1, len(fields) - 1)]
    if rng.random() < 0.25:
        rng.shuffle(fields)
    answer = json.dumps({field: values[field] for field in fields})
    said = surrounded(rng, said)
    plain, the = _listed(fields), _listed([f"the {field}" for field in fields])
    luck = rng.random()
    if luck < 0.6:
        ask = expand(
            rng,
            "[Extract the {f}|Extract the {f}|Extract the {f}|Extract {t}|Extract {f}|Please "
            "extract the {f}|Find the {f}|Get the {f}]",
            f=plain, t=the,
        )  # fmt: skip
        ask += expand(
            rng,
            "[: |: |: | from this sentence: | from the following text: | from this text: | as "
            "JSON: | as JSON: | from the text below.\n|:\n| in JSON: | and return JSON: ]",
        )
        return ask + said, answer
    if luck < 0.85:
        ask = expand(
            rng,
            "[Return JSON with {f}: |Return JSON with the fields {f}: |Return a JSON object "
            "with {f}: |Give me JSON with {f}: |Write JSON with {f}: |Answer in JSON with the "
            "keys {f}: |Turn this into JSON with {f}: ]",
            f=plain,
        )
        return ask + said, answer
    if luck < 0.93:
        ask = expand(
            rng,
            "[Extract {t} as JSON.|Return the {f} as JSON.|What are {t}? Answer in JSON.|Answer "
            "with JSON: {f}.]",
            f=plain, t=the,
        )  # fmt: skip
        return f"{said} {ask}", answer
    # The whole sentence: all of its values, in its order.
    ask = expand(rng, "[Turn this into JSON: |Convert to JSON: |Make JSON out of this: |As JSON: ]")
    return ask + said, json.dumps(values)


def names(rng: random.Random) -> tuple[str, str]:
    """Return a request for a list of names."""
    people = [first_name(rng) for _ in range(rng.randint(2, 4))]
    said = expand(
        rng,
        "{p} [went home|are friends|play football|came to the party|work together|live in {c}].",
        p=_listed(people), c=value(rng, "city"),
    )  # fmt: skip
    ask = "[Extract the names|Extract all names|List the names as JSON|Extract the names as JSON]: "
    return expand(rng, ask) + said, json.dumps({"names": people})


def question_about(rng: random.Random) -> tuple[str, str]:
    """Return a question about a given sentence, which trains the same skill without JSON."""
    said, values = sentence(rng)
    name = values.get("name")
    if name is None or "age" not in values or said[0] in "MI":
        return pair(rng)
    question = expand(rng, "[How old is {n}?|What is the age of {n}?|What is {n}'s age?]", n=name)
    return f"{said} {question}", f"{name} is {values['age']} years old."


def invented(rng: random.Random) -> tuple[str, str]:
    fields = rng.sample(
        ("name", "age", "city", "job", "colour", "animal", "email"), rng.randint(1, 3)
    )
    values = {field: value(rng, field) for field in fields}
    question = expand(
        rng,
        "[Give me a JSON object with {f}.|Write a JSON object with the keys {f}.|Return a JSON "
        "object with {f}.|Make up a person and give me the {f} as JSON.|Give me an example of "
        "JSON with {f}.]",
        f=_listed(fields),
    )
    return question, json.dumps(values)


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        luck = rng.random()
        if luck < 0.07:
            yield chat(*invented(rng))
            continue
        question, answer = pair(rng) if luck < 0.92 else question_about(rng)
        document = chat(question, answer)
        if answer[0] == "{" and rng.random() < 0.06:
            document = with_system(expand(rng, _SYSTEM), document)
        yield document
