"""Words that the generated exercises are filled with: everyday things, invented names, sentences.

They stand in `words.toml`; here they are put together. Nothing here knows what an exercise is.
"""

import tomllib
from pathlib import Path
from random import Random
from typing import Any

from replica.demo.phrasing import chance

_FILE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "words.toml").read_text())

LISTS: dict[str, str] = _FILE["lists"]
NOUNS: list[str] = _FILE["nouns"].split()
ADJECTIVES: list[str] = _FILE["adjectives"].split()
GIVEN_NAMES: list[str] = _FILE["given_names"].split()
SCRIPTS: list[str] = _FILE["scripts"].split()
_VERBS: list[str] = _FILE["verbs"].split()
_CITIES = [text.replace("_", " ") for text in _FILE["cities"].split()]
_ONSETS: list[str] = _FILE["onsets"].split()
_VOWELS: list[str] = _FILE["vowels"].split()
_CODAS: list[str] = ["", "", "", *_FILE["codas"].split()]


def invented(random: Random) -> str:
    """A word that no language has, pronounceable; so that copying is learnt, and not words."""
    count = random.choices((1, 2, 3), (2, 5, 2))[0]
    return "".join(
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS)
        for _ in range(count)
    )


def word(random: Random) -> str:
    """Some word: mostly a noun, sometimes an invented one."""
    return invented(random) if chance(random, 0.3) else random.choice(NOUNS)


def name(random: Random) -> str:
    """Some given name, a third of them invented."""
    return invented(random).capitalize() if chance(random, 0.35) else random.choice(GIVEN_NAMES)


def city(random: Random) -> str:
    """Some city, a third of them invented."""
    return invented(random).capitalize() if chance(random, 0.35) else random.choice(_CITIES)


def characters(random: Random) -> str:
    """A string that is no word: letters and digits, as in an order number."""
    alphabet = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789abcdefghijkmnopqrstuvwxyz-_"
    return "".join(random.choice(alphabet) for _ in range(random.randint(3, 9)))


def sentence(random: Random) -> str:
    """A simple sentence, correct and without much sense."""
    article = random.choice(("The", "A", "This", "Every", "One", "No"))
    text = f"{article} {_thing(random)} {random.choice(_VERBS)} the {_thing(random)}"
    if chance(random, 0.4):
        text += f" {random.choice(('near', 'behind', 'under', 'with', 'in'))} the {word(random)}"
    return text + "."


def _thing(random: Random) -> str:
    return f"{random.choice(ADJECTIVES)} {word(random)}" if chance(random, 0.5) else word(random)
