"""The exam: questions that were kept out of the training, alone, in later turns, after prompts.

Every probe is a conversation whose last message is the reference answer and carries the rule. The
turns before the question come from the training's generators, with their reference answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from replica.demo import tooling
from replica.demo.conversation import Conversation, Exchange, Message
from replica.demo.corpus import exchange, long_system, short_system
from replica.demo.skills import SKILLS, exercise
from replica.demo.topics import framed_exam, topic, written_exam

EACH = 40
"""Probes of a generated kind."""
LATER = 120
"""Probes of each later turn, and after system prompts."""


@dataclass(frozen=True)
class Probe:
    """One question of the exam."""

    kind: str
    conversation: Conversation


def exam(seed: int) -> list[Probe]:
    """All probes, the same for the same seed."""
    random = Random(seed)  # noqa: S311  -- an exam is repeatable, not secret
    probes = [*_alone("written paraphrase", written_exam())]
    probes += _alone("template paraphrase", framed_exam(random))
    for kind, (make, _) in SKILLS.items():
        made = (exercise(random, make, exam=True) for _ in range(EACH))
        probes += _alone(kind, made)
    probes += _with_tools(random)
    for turn, kind in ((2, "second turn"), (3, "third turn")):
        probes += [_after(random, kind, turn - 1, None) for _ in range(LATER)]
    probes += [_after(random, "short system prompt", 0, short_system(random)) for _ in range(LATER)]
    probes += [_after(random, "long system prompt", 0, long_system(random)) for _ in range(LATER)]
    return probes


def _alone(kind: str, exchanges: Iterator[Exchange]) -> Iterator[Probe]:
    for each in exchanges:
        yield Probe(kind, Conversation(each))


def _after(random: Random, kind: str, turns_before: int, system: str | None) -> Probe:
    """A held-out question behind a system prompt or trained turns on other subjects."""
    messages = [] if system is None else [Message("system", system)]
    for _ in range(turns_before):
        messages += exchange(random)
    return Probe(kind, Conversation((*messages, *exchange(random, exam=True))))


def _with_tools(random: Random) -> Iterator[Probe]:
    for _ in range(2 * EACH):
        use = tooling.use(random, exam=True)
        whole = Conversation(tooling.exchange(use), tooling.offer(random, use))
        call, answer = whole.probes()
        yield Probe("tool call", call)
        yield Probe("answer from tool", answer)
    for _ in range(EACH):
        yield Probe(
            "tool not needed", Conversation(topic(random, exam=True), tooling.offer(random, None))
        )
