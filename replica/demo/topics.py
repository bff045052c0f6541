"""The questions with written answers: what is trained, and what is held for the exam.

An entry of `topics/*.toml` has questions (`ask`, where (this|that) is a choice), noun phrases
(`term`, put into frames), the plainest questions (`plain`, always trained), others kept for the
exam (`held`), one answer, and perhaps `more`, the answer to "tell me more". This file knows the
entries, and no other kind of exchange.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from replica.demo.conversation import HERE, Exchange, ask
from replica.demo.judge import Like
from replica.demo.phrasing import chance, held_out, normal, phrases, pick, roughen, wordings

PLAIN_FRAMES = 3
"""So many of the frames are plain: every term is trained with them."""
ASKED_SHARE = 0.6
"""An entry with many terms has far more framed wordings than others; they are not to rule."""
PLAIN_SHARE = 0.12
CLUE_SHARE = 0.12
_NO_MORE = "That is all I know about it."


@dataclass(frozen=True)
class Entry:
    """One answer and all the ways to ask for it."""

    name: str
    plain: tuple[str, ...]
    """The plainest questions; they are among the trained ones."""
    trained: tuple[str, ...]
    asked: tuple[str, ...]
    """Those of the trained ones that are not frames around a term."""
    held: tuple[str, ...]
    """Written for the exam."""
    framed: tuple[str, ...]
    """Wordings of the trained kind that the held-out rule kept back."""
    answer: str
    more: str | None


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, in the order of their files."""
    found: list[Entry] = []
    for path in sorted((HERE / "topics").glob("*.toml")):
        found.extend(_entry(fields) for fields in tomllib.loads(path.read_text())["entry"])
    assert len({entry.name for entry in found}) == len(found), "two entries share a name"
    return tuple(found)


def _entry(fields: dict[str, object]) -> Entry:
    terms, asked, plain, held = (_texts(fields, key) for key in ("term", "ask", "plain", "held"))
    frames = phrases("frames")
    plain += [frame.format(term) for term in terms for frame in frames[:PLAIN_FRAMES]]
    framed = [frame.format(term) for term in terms for frame in frames]
    written = [text for pattern in asked for text in wordings(pattern)]
    kept = {normal(text) for text in held}
    always = {normal(text) for text in plain}
    usable = dict.fromkeys(_capital(text) for text in [*plain, *framed, *written])
    chosen = [text for text in usable if normal(text) not in kept]
    back = [text for text in chosen if held_out(text) and normal(text) not in always]
    in_full = {_capital(text) for text in [*_texts(fields, "plain"), *written]}
    more = fields.get("more")
    return Entry(
        name=str(fields["id"]),
        plain=tuple(text for text in chosen if normal(text) in always),
        trained=tuple(text for text in chosen if text not in set(back)),
        asked=tuple(text for text in chosen if text in in_full and text not in set(back)),
        held=tuple(held),
        framed=tuple(back),
        answer=str(fields["answer"]),
        more=None if more is None else str(more),
    )


def _texts(fields: dict[str, object], key: str) -> list[str]:
    values = fields.get(key, [])
    assert isinstance(values, list)
    return [str(value) for value in values]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def topic(random: Random, *, exam: bool) -> Exchange:
    """One question about an entry, sometimes with a second one that leans on its answer."""
    entry = random.choice(entries())
    rule = Like((entry.answer,))
    if exam:
        return ask(random.choice(entry.held), entry.answer, rule)
    first = ask(_trained(random, entry), entry.answer, rule)
    if chance(random, 0.3 if entry.more else 0.04):
        more = entry.more or _NO_MORE
        return first + ask(
            roughen(random, pick(random, random.choice(phrases("more")))), more, Like((more,))
        )
    if chance(random, 0.03):
        again = roughen(random, pick(random, random.choice(phrases("again"))))
        return first + ask(again, entry.answer, rule)
    return first


def _trained(random: Random, entry: Entry) -> str:
    """A wording of the question that is not in the exam, not even by a slip of the pen."""
    while True:
        if chance(random, PLAIN_SHARE) and entry.plain:
            return random.choice(entry.plain)
        if chance(random, CLUE_SHARE):
            question = _clue(random, entry.answer)
        else:
            pool = entry.asked if chance(random, ASKED_SHARE) else entry.trained
            question = roughen(random, random.choice(pool or entry.trained))
        if not held_out(question) and normal(question) not in _kept():
            return question


def _clue(random: Random, answer: str) -> str:
    """Ask with some words of the answer, so that each of them points to it."""
    words = answer.split()
    count = min(random.randint(3, 8), len(words))
    start = random.randrange(len(words) - count + 1)
    clue = " ".join(words[start : start + count]).strip(".,:;")
    return random.choice(phrases("clues")).format(clue)


@cache
def _kept() -> frozenset[str]:
    return frozenset(normal(question) for entry in entries() for question in entry.held)


def written_exam() -> Iterator[Exchange]:
    """Every question that was written for the exam, once."""
    for entry in entries():
        for question in entry.held:
            yield ask(question, entry.answer, Like((entry.answer,)))


def framed_exam(random: Random) -> Iterator[Exchange]:
    """One kept-back wording of each entry that has any."""
    for entry in entries():
        if entry.framed:
            yield ask(random.choice(entry.framed), entry.answer, Like((entry.answer,)))
