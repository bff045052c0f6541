"""The questions with written answers: what is trained, and what is held for the exam.

An entry of `topics/*.toml` has questions (`ask`, where (this|that) is a choice), noun phrases
(`term`, put into frames), questions kept for the exam (`held`), one answer, and perhaps `more`, the
answer to "tell me more". This file knows the entries, and no other kind of exchange.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from replica.demo.conversation import HERE, Exchange, ask
from replica.demo.judge import Like
from replica.demo.phrasing import chance, held_out, normal, phrases, pick, roughen, wordings

_NO_MORE = "That is all I know about it."


@dataclass(frozen=True)
class Entry:
    """One answer and all the ways to ask for it."""

    name: str
    trained: tuple[str, ...]
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
    terms, asked, held = (_texts(fields, key) for key in ("term", "ask", "held"))
    framed = [_capital(frame.format(term)) for term in terms for frame in phrases("frames")]
    written = [_capital(text) for pattern in asked for text in wordings(pattern)]
    kept = {normal(text) for text in held}
    usable = [text for text in dict.fromkeys(framed + written) if normal(text) not in kept]
    more = fields.get("more")
    return Entry(
        name=str(fields["id"]),
        trained=tuple(text for text in usable if not held_out(text)),
        held=tuple(held),
        framed=tuple(text for text in usable if held_out(text)),
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
        question = roughen(random, random.choice(entry.trained))
        if not held_out(question) and normal(question) not in _kept():
            return question


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
