"""Short questions and answers about the world.

A relation is a table with templates of questions and answers. Facts that fit no table are listed in
`texts/general.txt`. Every fact is asked in many ways, alone or with a short follow-up.
"""

import random
from collections.abc import Iterator

from .document import (
    Document,
    article,
    capitalize,
    careless,
    chat,
    expand,
    plural,
    questions_and_answers,
    text,
    with_system,
)

# country: (capital, continent, language), "" where it is left out
COUNTRIES = {
    line.split(":")[0].strip(): tuple(part.strip() for part in line.split(":")[1].split(","))
    for line in """
    France: Paris, Europe, French
    Germany: Berlin, Europe, German
    Italy: Rome, Europe, Italian
    Spain: Madrid, Europe, Spanish
    Portugal: Lisbon, Europe, Portuguese
    England: London, Europe, English
    the United Kingdom: London, Europe, English
    Ireland: Dublin, Europe, English
    Scotland: Edinburgh, Europe, English
    Wales: Cardiff, Europe,
    Belgium: Brussels, Europe,
    the Netherlands: Amsterdam, Europe, Dutch
    Luxembourg: Luxembourg City, Europe,
    Switzerland: Bern, Europe,
    Austria: Vienna, Europe, German
    Denmark: Copenhagen, Europe, Danish
    Norway: Oslo, Europe, Norwegian
    Sweden: Stockholm, Europe, Swedish
    Finland: Helsinki, Europe, Finnish
    Iceland: Reykjavik, Europe, Icelandic
    Poland: Warsaw, Europe, Polish
    the Czech Republic: Prague, Europe, Czech
    Slovakia: Bratislava, Europe, Slovak
    Hungary: Budapest, Europe, Hungarian
    Slovenia: Ljubljana, Europe, Slovene
    Croatia: Zagreb, Europe, Croatian
    Serbia: Belgrade, Europe, Serbian
    Romania: Bucharest, Europe, Romanian
    Bulgaria: Sofia, Europe, Bulgarian
    Greece: Athens, Europe, Greek
    Albania: Tirana, Europe, Albanian
    Malta: Valletta, Europe,
    Cyprus: Nicosia, ,
    Estonia: Tallinn, Europe, Estonian
    Latvia: Riga, Europe, Latvian
    Lithuania: Vilnius, Europe, Lithuanian
    Ukraine: Kyiv, Europe, Ukrainian
    Belarus: Minsk, Europe,
    Moldova: Chisinau, Europe, Romanian
    Russia: Moscow, , Russian
    Turkey: Ankara, , Turkish
    Georgia: Tbilisi, , Georgian
    Armenia: Yerevan, Asia, Armenian
    Azerbaijan: Baku, Asia,
    Israel: Jerusalem, Asia, Hebrew
    Jordan: Amman, Asia, Arabic
    Lebanon: Beirut, Asia, Arabic
    Syria: Damascus, Asia, Arabic
    Iraq: Baghdad, Asia, Arabic
    Iran: Tehran, Asia, Persian
    Saudi Arabia: Riyadh, Asia, Arabic
    Qatar: Doha, Asia, Arabic
    Oman: Muscat, Asia, Arabic
    Kuwait: Kuwait City, Asia, Arabic
    Yemen: Sanaa, Asia, Arabic
    the United Arab Emirates: Abu Dhabi, Asia, Arabic
    Afghanistan: Kabul, Asia,
    Pakistan: Islamabad, Asia, Urdu
    India: New Delhi, Asia,
    Nepal: Kathmandu, Asia, Nepali
    Bhutan: Thimphu, Asia,
    Bangladesh: Dhaka, Asia, Bengali
    Thailand: Bangkok, Asia, Thai
    Vietnam: Hanoi, Asia, Vietnamese
    Laos: Vientiane, Asia, Lao
    Cambodia: Phnom Penh, Asia, Khmer
    Malaysia: Kuala Lumpur, Asia, Malay
    Singapore: Singapore, Asia,
    Indonesia: Jakarta, Asia, Indonesian
    the Philippines: Manila, Asia,
    China: Beijing, Asia, Chinese
    Japan: Tokyo, Asia, Japanese
    South Korea: Seoul, Asia, Korean
    North Korea: Pyongyang, Asia, Korean
    Mongolia: Ulaanbaatar, Asia, Mongolian
    Kazakhstan: Astana, Asia, Kazakh
    Uzbekistan: Tashkent, Asia, Uzbek
    Egypt: Cairo, Africa, Arabic
    Libya: Tripoli, Africa, Arabic
    Tunisia: Tunis, Africa, Arabic
    Algeria: Algiers, Africa, Arabic
    Morocco: Rabat, Africa, Arabic
    Senegal: Dakar, Africa, French
    Mali: Bamako, Africa,
    Ghana: Accra, Africa, English
    Nigeria: Abuja, Africa, English
    Ethiopia: Addis Ababa, Africa, Amharic
    Kenya: Nairobi, Africa,
    Uganda: Kampala, Africa,
    Rwanda: Kigali, Africa,
    Tanzania: Dodoma, Africa, Swahili
    Somalia: Mogadishu, Africa, Somali
    Sudan: Khartoum, Africa, Arabic
    Angola: Luanda, Africa, Portuguese
    Zambia: Lusaka, Africa, English
    Zimbabwe: Harare, Africa,
    Namibia: Windhoek, Africa, English
    Botswana: Gaborone, Africa,
    Mozambique: Maputo, Africa, Portuguese
    Madagascar: Antananarivo, Africa,
    Canada: Ottawa, North America,
    the United States: Washington D.C., North America, English
    Mexico: Mexico City, North America, Spanish
    Cuba: Havana, North America, Spanish
    Jamaica: Kingston, North America, English
    Haiti: Port-au-Prince, North America,
    the Dominican Republic: Santo Domingo, North America, Spanish
    Guatemala: Guatemala City, North America, Spanish
    Honduras: Tegucigalpa, North America, Spanish
    Nicaragua: Managua, North America, Spanish
    Costa Rica: San Jose, North America, Spanish
    Panama: Panama City, North America, Spanish
    Colombia: Bogota, South America, Spanish
    Venezuela: Caracas, South America, Spanish
    Ecuador: Quito, South America, Spanish
    Peru: Lima, South America, Spanish
    Brazil: Brasilia, South America, Portuguese
    Chile: Santiago, South America, Spanish
    Argentina: Buenos Aires, South America, Spanish
    Uruguay: Montevideo, South America, Spanish
    Paraguay: Asuncion, South America, Spanish
    Australia: Canberra, Oceania, English
    New Zealand: Wellington, Oceania, English
    Fiji: Suva, Oceania,
    """.strip().splitlines()
}
FAMOUS = (
    "France;Germany;Italy;Spain;Portugal;Japan;China;India;Egypt;Brazil;Canada;Mexico;Russia"
    ";Greece;Australia;England;Norway;Sweden;Poland;Kenya;the United States"
).split(";")

# animal: (sound, young, legs, home, class)
ANIMALS = {
    "dog": ("woof", "puppy", "four", "a kennel", "mammal"),
    "cat": ("meow", "kitten", "four", "a house", "mammal"),
    "cow": ("moo", "calf", "four", "a barn", "mammal"),
    "horse": ("neigh", "foal", "four", "a stable", "mammal"),
    "sheep": ("baa", "lamb", "four", "a pen", "mammal"),
    "goat": ("bleat", "kid", "four", "a pen", "mammal"),
    "pig": ("oink", "piglet", "four", "a sty", "mammal"),
    "duck": ("quack", "duckling", "two", "a pond", "bird"),
    "chicken": ("cluck", "chick", "two", "a coop", "bird"),
    "goose": ("honk", "gosling", "two", "a pond", "bird"),
    "owl": ("hoot", "owlet", "two", "a hollow tree", "bird"),
    "frog": ("croak", "tadpole", "four", "a pond", "amphibian"),
    "lion": ("roar", "cub", "four", "the savanna", "mammal"),
    "tiger": ("roar", "cub", "four", "the jungle", "mammal"),
    "bear": ("growl", "cub", "four", "a den", "mammal"),
    "wolf": ("howl", "pup", "four", "the forest", "mammal"),
    "fox": ("yelp", "kit", "four", "a den", "mammal"),
    "mouse": ("squeak", "pup", "four", "a hole", "mammal"),
    "elephant": ("trumpet", "calf", "four", "the savanna", "mammal"),
    "bee": ("buzz", "larva", "six", "a hive", "insect"),
    "snake": ("hiss", "snakelet", "no", "a burrow", "reptile"),
    "donkey": ("hee-haw", "foal", "four", "a stable", "mammal"),
    "rabbit": ("", "kit", "four", "a burrow", "mammal"),
    "kangaroo": ("", "joey", "two", "Australia", "mammal"),
    "deer": ("", "fawn", "four", "the forest", "mammal"),
    "swan": ("", "cygnet", "two", "a lake", "bird"),
    "butterfly": ("", "caterpillar", "six", "a garden", "insect"),
    "spider": ("", "spiderling", "eight", "a web", "arachnid"),
    "ant": ("", "larva", "six", "an ant hill", "insect"),
    "whale": ("", "calf", "no", "the ocean", "mammal"),
    "shark": ("", "pup", "no", "the ocean", "fish"),
    "penguin": ("", "chick", "two", "Antarctica", "bird"),
    "camel": ("", "calf", "four", "the desert", "mammal"),
    "eagle": ("", "eaglet", "two", "a nest", "bird"),
    "turtle": ("", "hatchling", "four", "the water", "reptile"),
    "crocodile": ("", "hatchling", "four", "a river", "reptile"),
    "giraffe": ("", "calf", "four", "the savanna", "mammal"),
}
OPPOSITES = dict(
    pair.split("/")
    for pair in (
        "hot/cold big/small up/down left/right fast/slow high/low old/young day/night "
        "black/white good/bad happy/sad light/dark hard/soft wet/dry open/closed full/empty "
        "rich/poor strong/weak early/late near/far begin/end yes/no long/short thick/thin "
        "wide/narrow clean/dirty loud/quiet easy/difficult inside/outside above/below first/last "
        "love/hate true/false buy/sell win/lose push/pull give/take awake/asleep alive/dead "
        "sweet/sour heavy/light north/south east/west summer/winter friend/enemy before/after "
        "always/never more/less brave/afraid warm/cool deep/shallow smooth/rough"
    ).split()
)
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red",
    "coal": "black", "a lemon": "yellow", "milk": "white", "a tomato": "red", "the sun": "yellow",
    "chocolate": "brown", "an elephant": "grey", "a carrot": "orange", "a leaf in spring": "green",
    "a strawberry": "red", "the sea": "blue", "a frog": "green", "an orange": "orange",
    "a crow": "black",
    "a flamingo": "pink", "a polar bear": "white", "a ripe cherry": "red", "cucumber": "green",
    "gold": "yellow",
}  # fmt: skip
MIXES = {
    ("blue", "yellow"): "green", ("red", "yellow"): "orange", ("red", "blue"): "purple",
    ("red", "white"): "pink", ("black", "white"): "grey",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
UNITS = {  # (small, big): how many
    ("days", "a week"): "7", ("months", "a year"): "12", ("hours", "a day"): "24",
    ("minutes", "an hour"): "60", ("seconds", "a minute"): "60", ("days", "a year"): "365",
    ("weeks", "a year"): "52", ("days", "a leap year"): "366", ("seasons", "a year"): "4",
    ("years", "a decade"): "10", ("years", "a century"): "100", ("years", "a millennium"): "1000",
    ("centimetres", "a metre"): "100", ("metres", "a kilometre"): "1000",
    ("grams", "a kilogram"): "1000",
    ("millimetres", "a centimetre"): "10", ("kilograms", "a tonne"): "1000",
    ("items", "a dozen"): "12",
    ("cents", "a dollar"): "100", ("letters", "the English alphabet"): "26",
    ("bits", "a byte"): "8",
    ("inches", "a foot"): "12", ("feet", "a yard"): "3", ("colours", "a rainbow"): "7",
    ("minutes", "half an hour"): "30", ("days", "a weekend"): "2", ("sides", "a triangle"): "3",
    ("sides", "a square"): "4", ("sides", "a hexagon"): "6", ("sides", "a pentagon"): "5",
    ("sides", "an octagon"): "8", ("strings", "a violin"): "4", ("strings", "a guitar"): "6",
    ("players", "a football team"): "11", ("degrees", "a circle"): "360",
    ("planets", "the solar system"): "8",
    ("continents", "the world"): "7", ("vowels", "the English alphabet"): "5",
    ("months", "half a year"): "6",
}  # fmt: skip
WORDS_ABROAD = {
    "French": {"hello": "bonjour", "thank you": "merci", "goodbye": "au revoir", "yes": "oui",
               "water": "eau",
               "cat": "chat", "dog": "chien", "bread": "pain", "house": "maison", "friend": "ami"},
    "Spanish": {"hello": "hola", "thank you": "gracias", "goodbye": "adiós", "yes": "sí",
                "water": "agua",
                "cat": "gato", "dog": "perro", "bread": "pan", "house": "casa", "friend": "amigo"},
    "German": {"hello": "hallo", "thank you": "danke", "goodbye": "auf Wiedersehen", "yes": "ja",
               "water": "Wasser", "cat": "Katze", "dog": "Hund", "bread": "Brot", "house": "Haus",
               "friend": "Freund"},
    "Italian": {"hello": "ciao", "thank you": "grazie", "goodbye": "arrivederci", "yes": "sì",
                "water": "acqua",
                "cat": "gatto", "dog": "cane", "bread": "pane", "house": "casa", "friend": "amico"},
}  # fmt: skip

Pair = tuple[str, str]  # question, answer


def capital(rng: random.Random) -> Pair:
    country = rng.choice(FAMOUS) if rng.random() < 0.3 else rng.choice(tuple(COUNTRIES))
    city, _continent, _ = COUNTRIES[country]
    luck = rng.random()
    if luck < 0.62:
        question = expand(
            rng,
            "[What is the capital of {c}?|What is the capital of {c}?|What is the capital of "
            "{c}?|What's the capital of {c}?|capital of {c}|Capital of {c}?|Which city is the "
            "capital of {c}?|What city is the capital of {c}?|Tell me the capital of {c}.|Name "
            "the capital of {c}.|{c}'s capital?|What is the capital city of {c}?|What is {c}'s "
            "capital?|Do you know the capital of {c}?|Give me the capital of {c}.|I forgot the "
            "capital of {c}. What is it?|Can you tell me the capital of {c}?]",
            c=country,
        )
        return capitalize(question) if question[0] != "c" else question, (
            f"The capital of {country} is {city}."
        )
    if luck < 0.82:
        question = expand(
            rng,
            "[{city} is the capital of which country?|Which country has {city} as its capital?"
            "|Which country's capital is {city}?|What country is {city} the capital of?|Of "
            "which country is {city} the capital?]",
            city=city,
        )
        if city == "London":
            country = "the United Kingdom"
        return question, f"{city} is the capital of {country}."
    if luck < 0.92:
        other = rng.choice([c for c in COUNTRIES if COUNTRIES[c][0] != city])
        asked = city if rng.random() < 0.5 else COUNTRIES[other][0]
        question = f"Is {asked} the capital of {country}?"
        if asked == city:
            return question, f"Yes, {city} is the capital of {country}."
        return question, f"No, the capital of {country} is {city}."
    question = expand(
        rng,
        "[Where is {city}?|In which country is {city}?|Which country is {city} in?|Where is the "
        "city of {city}?]",
        city=city,
    )
    if city == "London":
        country = "the United Kingdom"
    return question, f"{city} is in {country}. It is the capital."


def country(rng: random.Random) -> Pair:
    name, (_, continent, language) = rng.choice(tuple(COUNTRIES.items()))
    if language and (rng.random() < 0.5 or not continent):
        question = expand(
            rng,
            "[What language do people speak in {c}?|Which language is spoken in {c}?|What "
            "language is spoken in {c}?|What do people speak in {c}?|language of {c}]",
            c=name,
        )
        return question, f"People in {name} speak {language}."
    if not continent:
        return country(rng)
    question = expand(
        rng,
        "[On which continent is {c}?|Which continent is {c} in?|What continent is {c} in?|Where "
        "is {c}?|Where in the world is {c}?]",
        c=name,
    )
    return question, f"{capitalize(name)} is in {continent}."


def animal(rng: random.Random) -> Pair:
    name, (sound, young, legs, home, kind) = rng.choice(tuple(ANIMALS.items()))
    a = article(name)
    choices = [
        ("[What is a baby {n} called?|What do you call a baby {n}?|What is the young of {a} "
         "called?|baby {n} name]",
         f"A baby {name} is called {article(young)}."),
        ("[How many legs does {a} have?|How many legs has {a}?|{A} has how many legs?]",
         f"{capitalize(a)} has {legs} legs."),
        ("[Where does {a} live?|Where do you find {a}?|Where is the home of {a}?]",
         f"{capitalize(a)} lives in {home}."),
        ("[What kind of animal is {a}?|What is {a}?|What sort of animal is {a}?]",
         f"{capitalize(a)} is {'a fish' if kind == 'fish' else article(kind)}."),
    ]  # fmt: skip
    if sound:
        choices += 2 * [
            ("[What sound does {a} make?|What does {a} say?|What noise does {a} make?|How does "
             "{a} sound?|What sound do {ns} make?]",
             f"{capitalize(a)} says {sound}." if sound in
             ("woof", "meow", "moo", "baa", "oink", "quack", "cluck", "hee-haw")
             else f"The sound of {a} is called {article(sound)}."),
        ]  # fmt: skip
    question, answer = rng.choice(choices)
    return expand(rng, question, a=a, A=capitalize(a), n=name, ns=plural(name)), answer


def about(rng: random.Random) -> Pair:
    """Return all facts about a country, a city or an animal, or a yes-no question on one."""
    ask = (
        "[Tell me about {t}.|What do you know about {t}?|Describe {t}.|What can you tell me "
        "about {t}?|What is {t}?]"
    )
    luck = rng.random()
    if luck < 0.35:
        name, (city, continent, language) = rng.choice(tuple(COUNTRIES.items()))
        place = f"{capitalize(name)} is a country" + (f" in {continent}." if continent else ".")
        speech = f" People there speak {language}." if language else ""
        return expand(rng, ask, t=name), f"{place} Its capital is {city}.{speech}"
    if luck < 0.5:
        name, (city, _, _) = rng.choice(tuple(COUNTRIES.items()))
        if name == "England" or name.startswith(city):
            return about(rng)
        return expand(rng, ask, t=city), f"{city} is the capital of {name}."
    name, (sound, _, legs, home, kind) = rng.choice(tuple(ANIMALS.items()))
    a, kind = capitalize(article(name)), "a fish" if kind == "fish" else article(kind)
    if luck < 0.8:
        ask = ask.replace("{t}", rng.choice(("{t}", "{ts}"))).replace(
            "What is {ts}", "What are {ts}"
        )
        known = f"{a} is {kind} with {legs} legs. It lives in {home}."
        return expand(rng, ask, t=article(name), ts=plural(name)), known
    if luck < 0.9 and sound:
        return f"Which animal says {sound}?", f"{a} says {sound}."
    other = rng.choice(("a mammal", "a bird", "a fish", "an insect", "a reptile"))
    answer = f"Yes, {a.lower()} is {kind}." if other == kind else f"No, {a.lower()} is {kind}."
    return f"Is {a.lower()} {other}?", answer


def opposite(rng: random.Random) -> Pair:
    word, other = rng.choice(tuple(OPPOSITES.items()))
    if rng.random() < 0.5 and list(OPPOSITES.values()).count(other) == 1 and other not in OPPOSITES:
        word, other = other, word
    question = expand(
        rng,
        "[What is the opposite of {w}?|What's the opposite of {w}?|opposite of {w}|Give me the "
        "opposite of {w}.|What"
        ' is the opposite of "{w}"?|Which word is the opposite of {w}?|Tell me the '
        "opposite of {w}.]",
        w=word,
    )
    return question, f"The opposite of {word} is {other}."


def colour(rng: random.Random) -> Pair:
    spelling = rng.choice(("colour", "color"))
    if rng.random() < 0.25:
        (one, two), mix = rng.choice(tuple(MIXES.items()))
        if rng.random() < 0.5:
            one, two = two, one
        question = expand(
            rng,
            "[What {s} do you get when you mix {a} and {b}?|What do {a} and {b} make?|Mix {a} "
            "and {b}. What {s} is it?|What is {a} mixed with {b}?]",
            s=spelling, a=one, b=two,
        )  # fmt: skip
        return question, f"If you mix {one} and {two}, you get {mix}."
    thing, hue = rng.choice(tuple(COLOURS.items()))
    question = expand(
        rng,
        "[What {s} is {t}?|What {s} is {t}?|What is the {s} of {t}?|Which {s} is {t}?|Which {s} "
        "does {t} have?|Tell me the {s} of {t}.]",
        s=spelling, t=thing,
    )  # fmt: skip
    return question, f"{capitalize(thing)} is {hue}."


def calendar(rng: random.Random) -> Pair:
    names, unit, whole = rng.choice(((DAYS, "day", "week"), (MONTHS, "month", "year")))
    i = rng.randrange(len(names))
    name, after, before = names[i], names[(i + 1) % len(names)], names[i - 1]
    choices = [
        ("[What {u} comes after {n}?|Which {u} comes after {n}?|What comes after {n}?|What is "
         "the {u} after {n}?|Which {u} follows {n}?]", f"{after} comes after {name}."),
        ("[What {u} comes before {n}?|Which {u} comes before {n}?|What comes before {n}?|What "
         "is the {u} before {n}?]",
         f"{before} comes before {name}."),
        ("[What is the {o} {u} of the {w}?|Which {u} is the {o} of the {w}?|Name the {o} {u} of "
         "the {w}.]",
         f"The {ORDINALS[i]} {unit} of the {whole} is {name}."),
    ]  # fmt: skip
    if unit == "month":
        extra = " In a leap year, it has 29." if i == 1 else ""
        choices.append((
            "[How many days does {n} have?|How many days are in {n}?|How many days are there in "
            "{n}?|How long is {n}?]", f"{name} has {MONTH_DAYS[i]} days.{extra}"))  # fmt: skip
        season = ("winter", "spring", "summer", "autumn")[(i + 1) % 12 // 3]
        choices.append((
            "[In which season is {n}?|What season is {n} in?|Is {n} in summer or winter?|Which "
            "season is it in {n}?]",
            f"In the north of the world, {name} is in {season}."))  # fmt: skip
    else:
        choices.append((
            "[If today is {n}, what day is tomorrow?|Today is {n}. What day is tomorrow?|It is "
            "{n} today. What day will it be tomorrow?]",
            f"If today is {name}, tomorrow is {after}."))  # fmt: skip
        choices.append((
            "[If today is {n}, what day was yesterday?|Today is {n}. What day was yesterday?]",
            f"If today is {name}, yesterday was {before}."))  # fmt: skip
    question, answer = rng.choice(choices)
    return expand(rng, question, u=unit, n=name, w=whole, o=ORDINALS[i]), answer


def planet(rng: random.Random) -> Pair:
    i = rng.randrange(8)
    if rng.random() < 0.5:
        question = expand(
            rng,
            "[Which planet is the {o} from the sun?|What is the {o} planet from the sun?|Name "
            "the {o} planet from the sun.|What is the {o} planet?]",
            o=ORDINALS[i],
        )
    else:
        question = expand(
            rng,
            "[Which planet is {p}, counted from the sun?|What number is the planet {p}?|Where "
            "in the solar system is {p}?|Which position does {p} have?]",
            p=PLANETS[i],
        )
    return question, f"{PLANETS[i]} is the {ORDINALS[i]} planet from the sun."


def unit(rng: random.Random) -> Pair:
    (small, big), count = rng.choice(tuple(UNITS.items()))
    question = expand(
        rng,
        "[How many {s} are in {b}?|How many {s} are there in {b}?|How many {s} does {b} have?"
        "|{S} in {b}?|How many {s} make {b}?|number of {s} in {b}|Do you know how many {s} are "
        "in {b}?]",
        s=small, S=capitalize(small), b=big,
    )  # fmt: skip
    return question, f"There are {count} {small} in {big}."


def number(rng: random.Random) -> Pair:
    n = rng.randrange(1, 100)
    luck = rng.random()
    if luck < 0.25:
        question = expand(
            rng,
            "[What number comes after {n}?|What comes after {n}?|Which number is next after {n}?]",
            n=n,
        )
        return question, f"{n + 1} comes after {n}."
    if luck < 0.45:
        question = expand(
            rng,
            "[What number comes before {n}?|What comes before {n}?|Which number is before {n}?]",
            n=n,
        )
        return question, f"{n - 1} comes before {n}."
    if luck < 0.6:
        m = rng.choice([k for k in range(100) if k != n])
        question = expand(
            rng,
            "[Which number is bigger, {n} or {m}?|Which is bigger, {n} or {m}?|What is larger, "
            "{n} or {m}?|Is {n} bigger than {m}?|Which is greater: {n} or {m}?]",
            n=n, m=m,
        )  # fmt: skip
        if question.startswith("Is"):
            return question, (
                f"Yes, {n} is bigger than {m}." if n > m else f"No, {n} is smaller than {m}."
            )
        return question, f"{max(n, m)} is bigger than {min(n, m)}."
    if luck < 0.75:
        question = expand(
            rng, "[Is {n} even or odd?|Is {n} an even number?|Is the number {n} odd or even?]", n=n
        )
        return question, f"{n} is {'odd' if n % 2 else 'even'}."
    if luck < 0.9:
        k = rng.randrange(21)
        if rng.random() < 0.5:
            return expand(
                rng,
                "[How do you write {k} in words?|Write {k} as a word.|Spell the number {k}.]",
                k=k,
            ), (f"{k} in words is {NUMBERS[k]}.")
        return expand(
            rng,
            "[Write {w} as a number.|Which number is {w}?|What is {w} in digits?]",
            w=NUMBERS[k],
        ), f"{capitalize(NUMBERS[k])} is {k}."
    start = rng.choice((1, 1, 1, rng.randrange(1, 20)))
    end = rng.choice((5, 10)) if start == 1 else start + rng.randrange(3, 8)
    question = expand(rng, "[Count from {a} to {b}.|Please count from {a} to {b}.]", a=start, b=end)
    if start == 1:
        question = expand(
            rng, "[Count to {w}.|Count to {b}.|Count from 1 to {b}.|Can you count to {w}?]",
            w=NUMBERS[end], b=end,
        )  # fmt: skip
    return question, ", ".join(str(k) for k in range(start, end + 1)) + "."


def alphabet(rng: random.Random) -> Pair:
    i = rng.randrange(26)
    letter = chr(65 + i)
    if i and rng.random() < 0.4:
        return expand(
            rng, "[What letter comes before {x}?|Which letter is before {x}?]", x=letter
        ), (f"The letter before {letter} is {chr(64 + i)}.")
    if i < 25:
        return expand(
            rng, "[What letter comes after {x}?|Which letter comes after {x}?]", x=letter
        ), (f"The letter after {letter} is {chr(66 + i)}.")
    return "What is the last letter of the alphabet?", "The last letter of the alphabet is Z."


def abroad(rng: random.Random) -> Pair:
    language, words = rng.choice(tuple(WORDS_ABROAD.items()))
    word, foreign = rng.choice(tuple(words.items()))
    question = expand(
        rng,
        "[How do you say {w} in {l}?|What is {w} in {l}?|Translate {w} to {l}.|What is the {l} "
        "word for {w}?|How do I"
        ' say "{w}" in {l}?|{w} in {l}]',
        w=word, l=language,
    )  # fmt: skip
    return question, f'"{capitalize(word)}" in {language} is "{foreign}".'


_LISTS = {
    "animals": "dogs cats horses cows lions tigers elephants rabbits bears foxes monkeys".split(),
    "colours": "red blue green yellow orange purple pink black white brown".split(),
    "colors": "red blue green yellow orange purple pink black white brown".split(),
    "fruits": "apples bananas oranges pears grapes cherries lemons strawberries peaches".split(),
    "vegetables": "carrots potatoes onions tomatoes peas beans cabbage spinach".split(),
    "countries": "France Germany Italy Spain Japan China India Brazil Canada Egypt Mexico".split(),
    "capitals": "Paris Berlin Rome Madrid Tokyo Beijing Cairo Ottawa London Athens".split(),
    "cities": "Paris Berlin Rome Madrid Tokyo Beijing Cairo London Athens Toronto Sydney".split(),
    "planets": PLANETS,
    "days of the week": DAYS,
    "months": MONTHS,
    "sports": "football tennis swimming basketball running cycling hockey golf".split(),
    "instruments": "the piano/the violin/the guitar/the drum/the flute/the trumpet".split("/"),
    "birds": "owls ducks eagles penguins swans crows chickens sparrows".split(),
    "farm animals": "cows pigs sheep goats horses chickens ducks donkeys".split(),
    "languages": "English French German Spanish Italian Chinese Japanese Arabic Russian".split(),
    "shapes": "a circle/a square/a triangle/a rectangle/a star/a hexagon".split("/"),
    "jobs": "doctors teachers bakers farmers pilots nurses painters cooks".split(),
}


def listing(rng: random.Random) -> Pair:
    what, items = rng.choice(tuple(_LISTS.items()))
    count = rng.randrange(2, 6)
    chosen = items[:count] if items in (DAYS, MONTHS, PLANETS) else rng.sample(items, count)
    question = expand(
        rng,
        "[Name {n} {w}.|List {n} {w}.|Tell me {n} {w}.|Can you name {n} {w}?|Give me {n} {w}."
        "|Give me a list of {n} {w}.|Write down {n} {w}.]",
        n=NUMBERS[count] if rng.random() < 0.7 else count, w=what,
    )  # fmt: skip
    if rng.random() < 0.3:
        return question, "\n".join(f"{i}. {capitalize(x)}" for i, x in enumerate(chosen, 1))
    return question, f"{capitalize(', '.join(chosen[:-1]))} and {chosen[-1]}."


def general(rng: random.Random) -> Pair:
    questions, answer = rng.choice(questions_and_answers("general"))
    return rng.choice(questions), expand(rng, answer)


RELATIONS = {
    capital: 30, country: 6, about: 10, animal: 18, opposite: 7, colour: 6, calendar: 8, planet: 2,
    unit: 8, number: 8,
    alphabet: 2, abroad: 3, listing: 7, general: 26,
}  # fmt: skip


def fact(rng: random.Random) -> Pair:
    relation = rng.choices(tuple(RELATIONS), tuple(RELATIONS.values()))[0]
    return relation(rng)


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        luck = rng.random()
        if luck < 0.05:  # the answer alone, if a system prompt demands it
            name, (city, _, _) = rng.choice(tuple(COUNTRIES.items()))
            system = expand(
                rng,
                "[Answer in one word.|Answer with one word only.|Be very brief.|Answer as "
                "briefly as possible.|Give only the answer, no sentence.]",
            )
            question = f"What is the capital of {name}?"
            if rng.random() < 0.5:
                yield chat(f"{question} {system}", f"{city}.")
            else:
                yield with_system(system, chat(question, f"{city}."))
        elif luck < 0.17:
            yield text(raw_fact(rng))
        else:
            question, answer = fact(rng)
            yield chat(careless(rng, question), answer)


def raw_fact(rng: random.Random) -> str:
    """Return a few plain sentences on one subject, as in an encyclopedia for children."""
    if rng.random() < 0.5:
        name = rng.choice(FAMOUS) if rng.random() < 0.4 else rng.choice(tuple(COUNTRIES))
        city, continent, language = COUNTRIES[name]
        sentences = [f"The capital of {name} is {city}."]
        if continent:
            sentences.append(f"{capitalize(name)} is a country in {continent}.")
        if language:
            sentences.append(f"People there speak {language}.")
        return " ".join(sentences)
    if rng.random() < 0.6:
        name, (_sound, young, legs, home, kind) = rng.choice(tuple(ANIMALS.items()))
        sentences = [
            f"{capitalize(article(name))} is {'a fish' if kind == 'fish' else article(kind)}.",
            f"It has {legs} legs.",
            f"It lives in {home}.",
            f"A baby {name} is called {article(young)}.",
        ]
        return " ".join(sentences)
    return " ".join(fact(rng)[1] for _ in range(rng.randrange(1, 4)))
