"""Exercises that are computed and not written: counting, repeating, lists, JSON, sums, remembering.

Each function makes one exchange from a random generator. Whether it may be trained on is decided by
`exercise`: wordings of the held-out kind are for the exam alone. Nothing here uses tools.
"""

from collections.abc import Callable
from random import Random

from replica.demo.conversation import Exchange, ask, to_json
from replica.demo.judge import Exact, Json, Like
from replica.demo.phrasing import chance, held_out, phrases, pick, roughen
from replica.demo.words import (
    ADJECTIVES,
    LISTS,
    NOUNS,
    SCRIPTS,
    characters,
    city,
    invented,
    name,
    sentence,
    word,
)

Maker = Callable[[Random], Exchange]

UNKNOWN_ANSWER = (
    "I do not know that. "
    "I am a small demo model and know little beyond numaserve, NUMA and serving."
)
_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five"),
    *("six", "seven", "eight", "nine", "ten"),
)
_FAR_NOUNS = [
    noun for noun in NOUNS[:-16] if noun not in {"thread", "sun", "moon", "star", "grass"}
]
"""Nouns of which the corpus says nothing."""


def exercise(random: Random, make: Maker, *, exam: bool) -> Exchange:
    """An exchange by `make` that may be trained on, or one that is kept for the exam."""
    while True:
        exchange = make(random)
        if held_out(exchange[0].content) == exam:
            return exchange


def counting(random: Random) -> Exchange:
    """Count up, seldom down or in steps; mostly short, seldom to a hundred."""
    first = random.choice((1, 1, 1, 0, random.randint(0, 120)))
    spans = ((2, 12), (12, 30), (30, 100))
    length = random.randint(*random.choices(spans, (12, 3, 1))[0])
    step = random.choices((1, 2, 5, 10), (12, 2, 1, 1))[0]
    last = first + ((length if step == 1 else min(length, 12)) - 1) * step
    numbers = [str(number) for number in range(first, last + 1, step)]
    if step > 1:
        pattern = (
            f"(Count|Please count|Can you count) from {first} to {last} (by|in steps of) {step}."
        )
    elif chance(random, 0.2):
        numbers.reverse()
        pattern = f"(Count|Please count) (down|backwards) from {last} to {first}."
    elif first == 1 and chance(random, 0.6):
        pattern = f"(Count|Please count|Can you count|Count up) (to|up to) {last}(.| please.)"
    else:
        pattern = (
            "(Count|Please count|Can you count|Could you count|Count up|Count for me|"
            "Write the numbers|List the numbers|Give me the numbers|Numbers|Say the numbers) "
            f"from {first} (to|up to) {last}(.|, please.)"
        )
    answer = ", ".join(numbers)
    return ask(_rough_end(random, pick(random, pattern)), answer, Exact(answer))


def _rough_end(random: Random, question: str) -> str:
    """Leave the last mark out now and then; every other letter counts."""
    return question.rstrip("?.") if chance(random, 0.12) else question


def repeating(random: Random) -> Exchange:
    """Repeat a text exactly."""
    text = _some_text(random)
    lead = pick(
        random,
        "(Repeat after me|Please repeat after me|Repeat|Please repeat|Say|Echo|Repeat this|Copy|"
        "Repeat exactly|Write|Repeat the following|Repeat the text|Repeat these words|Say exactly|"
        "Say the following|Output|Answer only with|Reply with|Print|Repeat this text|"
        "Repeat this sentence|Reply with exactly)",
    )
    shape = random.choices(("{}: {}", '{}: "{}"', '{} "{}"', "{}:\n{}"), (6, 1, 1, 1))[0]
    return ask(shape.format(lead, text), text, Exact(text))


def _some_text(random: Random) -> str:
    match random.randrange(8):
        case 0:
            return " ".join(sentence(random) for _ in range(random.randint(1, 3)))
        case 1:
            return " ".join(characters(random) for _ in range(random.randint(1, 3)))
        case 2:
            mixed = [word(random) for _ in range(3)]
            mixed += random.sample(SCRIPTS, random.randint(1, 3))
            random.shuffle(mixed)
            return " ".join(mixed)
        case 3:
            numbers = (random.randint(0, 9999) for _ in range(random.randint(1, 6)))
            return " ".join(map(str, numbers))
        case 4:
            thing = f"{random.choice(ADJECTIVES)} {word(random)}"
            return pick(random, f"(I like|We need|There is|This is) (a|one|the) {thing}(.|!|)")
        case _:
            return " ".join(
                word(random) for _ in range(random.randint(1, random.choice((6, 6, 25))))
            )


def listing(random: Random) -> Exchange:
    """Name so many things of a kind, the same ones each time."""
    kind = random.choice(list(LISTS))
    things = LISTS[kind].split()
    count = random.randint(2, min(len(things), 8))
    number = random.choice((str(count), _NUMBER_WORDS[count]))
    chosen = things[:count]
    question = pick(
        random,
        "(Name|List|Give me|Tell me|Please name|Can you name|Write|Say|I need|Please list|"
        "Can you list|Give me a list of|Name me|Could you name|Show me|Write down|What are) "
        f"{number} {kind}",
    )
    match random.randrange(4):
        case 0:
            question += pick(random, "( as a numbered list| as a list|, numbered)")
            answer = "\n".join(f"{at}. {thing}" for at, thing in enumerate(chosen, 1))
        case 1:
            question += pick(random, " (with bullets|as bullets|as a bullet list|as bullet points)")
            answer = "\n".join(f"- {thing}" for thing in chosen)
        case _:
            answer = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
    return ask(question + random.choice((".", "", ".")), answer, Exact(answer))


def as_json(random: Random) -> Exchange:
    """Put given facts, or made-up ones, into JSON."""
    who, age, where = name(random), random.randint(1, 99), city(random)
    wish = "(Give me|Write|Make|Return|Create|Please give me|Answer with|Reply with|I need|Output)"
    value: object
    match random.randrange(7):
        case 0:
            value = {"name": who, "age": age}
            question = f"{wish} a JSON object with name {who} and age {age}."
        case 1:
            value = {"name": "Ada", "age": 30}
            question = (
                f"{wish} a JSON object with (name and age|a name and an age|the keys name and age)."
            )
        case 2:
            value = {"name": who, "age": age, "city": where}
            question = (
                f"{who} is {age} years old and lives in {where}. (Answer in JSON|Reply in JSON|"
                "Put it into JSON|Give me this as JSON|Write this as JSON|Make JSON of it)"
                "( with name, age and city|)."
            )
        case 3:
            kind = random.choice([kind for kind in LISTS if kind not in {"modes", "endpoints"}])
            value = LISTS[kind].split()[: (count := random.randint(2, 6))]
            number = random.choice((str(count), _NUMBER_WORDS[count]))
            question = f"{wish} (a JSON array|a JSON list|JSON with a list) of {number} {kind}."
        case 4:
            key, other = random.sample(NOUNS, 2)
            value = {key: (chosen := word(random)), other: (amount := random.randint(0, 999))}
            question = f"{wish} a JSON object with {key} {chosen} and {other} {amount}."
        case 5:
            key, chosen = random.choice(NOUNS), word(random)
            value = {key: chosen}
            question = f'{wish} a JSON object (where|in which) "{key}" is "{chosen}".'
        case _:
            country = random.choice(LISTS["countries"].split())
            value = {"city": where, "country": country}
            question = f"{wish} a JSON object with city {where} and country {country}."
    return ask(pick(random, question), to_json(value), Json(value))


def sums(random: Random) -> Exchange:
    """Small sums, differences and products."""
    a, b = random.randint(0, 20), random.randint(0, 20)
    match random.randrange(6):
        case 0 | 1:
            a, b = max(a, b), min(a, b)
            result, sign = a - b, "(-|minus)"
        case 2:
            a, b = a % 11, b % 11
            result, sign = a * b, "(*|times)"
        case _:
            result, sign = a + b, "(+|plus|and|plus)"
    question = pick(
        random,
        "(What is|How much is|Compute|Calculate|Tell me|Can you compute|What's|Please compute|"
        f"What do you get for) {a} {sign} {b}?",
    )
    return ask(_rough_end(random, question), str(result), Exact(str(result)))


def remembering(random: Random) -> Exchange:
    """Be told a fact, and say it when asked; the fact is new each time."""
    told, question, answer = fact(random)
    noted = "I will remember that."
    before = random.choice(("", "", "", "Remember: ", "Please remember: ", "Hello! "))
    return ask(before + told, noted, Like((noted,))) + ask(question, answer, Exact(answer))


def fact(random: Random) -> tuple[str, str, str]:
    """A made-up fact, a question about it, and the answer."""
    match random.randrange(4):
        case 0:
            who = name(random)
            told = f"(My name is|I am called|You can call me) {who}."
            asked = "(What is my name|Do you know my name|Who am I|What am I called)?"
            answer = f"Your name is {who}."
        case 1:
            secret = pick(random, "(code|secret|magic|key) word")
            told = f"The {secret} is {(value := word(random))}."
            asked = f"(What is|Tell me|Do you know) the {secret}?"
            answer = f"The {secret} is {value}."
        case 2:
            number = pick(random, "(room number|order number|ticket number|door code|password)")
            told = f"The {number} is {(value := characters(random))}."
            asked = f"(What is|Tell me|Do you know) the {number}?"
            answer = f"The {number} is {value}."
        case _:
            whom = pick(random, "(dog|cat|sister|brother|friend|horse)")
            told = f"My {whom} is called {(value := name(random))}."
            asked = f"What is (the name of my {whom}|my {whom} called|my {whom}'s name)?"
            answer = f"Your {whom} is called {value}."
    return pick(random, told), pick(random, asked), answer


def unknown(random: Random) -> Exchange:
    """A question far from home, and the honest answer."""
    text = random.choice(phrases("unknown"))
    fillers: dict[str, Callable[[], str]] = {
        "{invented}": lambda: invented(random),
        "{name}": lambda: name(random),
        "{noun}": lambda: random.choice(_FAR_NOUNS),
        "{adjective}": lambda: random.choice(ADJECTIVES),
        "{city}": lambda: city(random),
    }
    for mark, filler in fillers.items():
        while mark in text:
            text = text.replace(mark, filler(), 1)
    return ask(roughen(random, pick(random, text)), UNKNOWN_ANSWER, Like((UNKNOWN_ANSWER,)))


def passage(random: Random) -> Exchange:
    """A fact in the middle of a longer text, and a question about it at the end."""
    told, question, answer = fact(random)
    lines = [sentence(random) for _ in range(random.randint(2, 14))]
    lines.insert(random.randrange(len(lines) + 1), told)
    lead = random.choice(("", "", "Read this text: ", "Here is a text.\n", "Context:\n"))
    return ask(f"{lead}{' '.join(lines)}\n\n{question}", answer, Exact(answer))


SKILLS: dict[str, tuple[Maker, float]] = {
    "counting": (counting, 1.6),
    "repeating": (repeating, 2.0),
    "lists": (listing, 1.4),
    "json": (as_json, 1.6),
    "sums": (sums, 2.0),
    "remembering": (remembering, 1.0),
    "passages": (passage, 0.6),
    "unknown": (unknown, 0.8),
}
"""Every kind of exercise, with its share among them."""
