"""How a question may be put: alternatives, small slips of the pen, and what is kept for the exam.

Nothing here knows what the questions are about.
"""

import re
import tomllib
import zlib
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

HELD_OUT_SHARE = 8
"""One wording in this many is never trained on."""

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")


@cache
def phrases(name: str) -> tuple[str, ...]:
    """A list of `phrases.toml`."""
    return tuple(_file()[name])


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "phrases.toml").read_text())


def chance(random: Random, share: float) -> bool:
    """Whether something that happens in this share of cases happens now."""
    return random.random() < share


def wordings(pattern: str) -> list[str]:
    """Every text that `pattern` stands for: (one|the other|) is a choice, perhaps of nothing."""
    parts = _CHOICE.split(pattern)
    choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def pick(random: Random, pattern: str) -> str:
    """One of the texts that `pattern` stands for."""
    return _CHOICE.sub(lambda match: random.choice(match[1].split("|")), pattern)


def normal(text: str) -> str:
    """Reduce a wording to what it says: letters, digits and the blanks between."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def held_out(text: str) -> bool:
    """Whether this wording is kept for the exam; decided by the wording alone."""
    return zlib.crc32(normal(text).encode()) % HELD_OUT_SHARE == 0


def roughen(random: Random, question: str) -> str:
    """Put a question as hurried people do; about half stay as they are."""
    text = question
    if chance(random, 0.4):
        text = rewrite(random, text)
    if chance(random, 0.35):
        text = _exchange_words(random, text)
    if chance(random, 0.15):
        text = random.choice(phrases("before")) + (
            text if chance(random, 0.5) else _lower_first(text)
        )
    if chance(random, 0.12):
        text += random.choice(phrases("after"))
    if chance(random, 0.15):
        text = _drop_word(random, text)
    if chance(random, 0.12):
        text = text.lower()
    if chance(random, 0.12):
        text = text.rstrip("?.!")
    if chance(random, 0.08):
        text = _slip(random, text)
    return text


def rewrite(random: Random, question: str) -> str:
    """Put a question in another form, where a form of it is known; not always good English."""
    for rule in _file()["rewriting"]:
        if re.match(rule["found"], question):
            text = re.sub(rule["found"], random.choice(rule["becomes"]), question)
            return text[:1].upper() + text[1:]
    return question


def _exchange_words(random: Random, text: str) -> str:
    def other(match: re.Match[str]) -> str:
        word = match[0]
        options: list[str] | None = _file()["synonyms"].get(word.lower())
        if options is None or chance(random, 0.5):
            return word
        chosen = random.choice(options)
        return chosen.capitalize() if word[0].isupper() else chosen

    return re.sub(r"[A-Za-z]+", other, text)


def _drop_word(random: Random, text: str) -> str:
    words = text.split()
    if len(words) > 3:  # noqa: PLR2004 -- of less, nothing can be spared
        del words[random.randrange(len(words))]
    return " ".join(words)


def _lower_first(text: str) -> str:
    first, _, rest = text.partition(" ")
    return f"{first.lower()} {rest}" if first.istitle() else text


def _slip(random: Random, text: str) -> str:
    """Drop, double or swap one letter somewhere."""
    at = random.randrange(max(len(text) - 1, 1))
    kind = random.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at : at + 1] * 2 + text[at + 1 :]
    return text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
