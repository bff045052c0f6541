"""When is a reply acceptable: one explicit rule per question.

A reply that did not stop by itself is never acceptable; that is for the caller to see. This file
knows replies and rules, and neither the questions nor the model.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

LIKENESS_MIN = 0.6
"""The least likeness (F1 of the content words) of a free answer to a reference."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_FILLING = frozenset(
    {"a", "an", "the", "is", "are", "was", "be", "it", "its", "in", "on", "of", "to", "and", "or"}
    | {"for", "with", "by", "as", "at", "that", "this", "you", "i", "not", "so"}
)


@dataclass(frozen=True)
class Like:
    """The reply must share most of its content words with one of these."""

    references: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """The reply must be this text; blanks around it do not count."""

    text: str


@dataclass(frozen=True)
class Json:
    """The reply must be JSON of this value, and nothing else."""

    value: Any


@dataclass(frozen=True)
class Calls:
    """The reply must be exactly these tool calls, as (name, arguments)."""

    calls: tuple[tuple[str, dict[str, Any]], ...]


Rule = Like | Exact | Json | Calls


def accepts(rule: Rule, reply: str) -> bool:
    """Whether `reply` satisfies `rule`."""
    match rule:
        case Like(references):
            return max(likeness(reference, reply) for reference in references) >= LIKENESS_MIN
        case Exact(text):
            return reply.strip() == text.strip()
        case Json(value):
            return bool(_parsed(reply) == value)
        case Calls(calls):
            return _calls(reply) == list(calls)


def likeness(reference: str, reply: str) -> float:
    """F1 of the content words of two texts, each counted as often as it occurs."""
    expected, found = _content_words(reference), _content_words(reply)
    shared = (expected & found).total()
    return 2 * shared / max(expected.total() + found.total(), 1)


def _content_words(text: str) -> Counter[str]:
    words = re.findall(r"\w+", text.lower())
    return Counter(word for word in words if word not in _FILLING)


def _parsed(reply: str) -> object:
    try:
        value: object = json.loads(reply)
    except ValueError:
        return ValueError
    return value


def _calls(reply: str) -> list[tuple[object, object]]:
    calls: list[tuple[object, object]] = []
    for body in _TOOL_CALL.findall(reply):
        call = _parsed(body)
        if not isinstance(call, dict):
            return []
        calls.append((call.get("name"), call.get("arguments")))
    return calls
