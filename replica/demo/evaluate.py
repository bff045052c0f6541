"""Asks the demo model the exam and prints the share answered acceptably, by kind of question.

`python -m replica.demo.evaluate` asks the shipped file through llama.cpp; with `--url` it asks a
running server instead. Acceptable means: it stopped by itself and satisfies the question's rule.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from replica.demo.conversation import MODEL_FILE, Conversation
from replica.demo.exam import Probe, exam
from replica.demo.judge import accepts
from replica.demo.over_http import Remote
from replica.demo.talker import Reply, Talker

TEMPERATURES = (0.0, 0.7)

Speaker = Callable[[Conversation, float, Random], Reply]


@dataclass(frozen=True)
class Result:
    """How one probe went at one temperature."""

    probe: Probe
    temperature: float
    reply: Reply
    acceptable: bool


def put(probe: Probe, speaker: Speaker, temperature: float, random: Random) -> Result:
    """Ask one question and judge the reply."""
    *before, reference = probe.conversation.messages
    assert reference.rule is not None, "a probe ends with what is judged"
    reply = speaker(replace(probe.conversation, messages=tuple(before)), temperature, random)
    acceptable = reply.stopped and accepts(reference.rule, reply.text)
    return Result(probe, temperature, reply, acceptable)


def table(results: list[Result]) -> Table:
    """Shares by kind of question and temperature."""
    shares: dict[str, dict[float, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for kind in (result.probe.kind, "all"):
            shares[kind][result.temperature].append(result.acceptable)
    made = Table("kind", "questions", "greedy", "T = 0.7")
    for kind in sorted(shares, key=lambda kind: kind == "all"):
        counts = [shares[kind][temperature] for temperature in TEMPERATURES]
        percents = [f"{100 * sum(count) / len(count):.1f} %" for count in counts]
        made.add_row(kind, str(len(counts[0])), *percents, end_section=kind == "third turn")
    return made


def describe(result: Result) -> str:
    """A failure in full, for reading."""
    *before, reference = result.probe.conversation.messages
    stop = "" if result.reply.stopped else " (did not stop)"
    return (
        f"--- {result.probe.kind}, T = {result.temperature}{stop}\nQ: {before[-1].content[-300:]}\n"
        f"A: {result.reply.text}\nexpected: {reference.content or reference.tool_calls}"
    )


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=MODEL_FILE,
    show_default=True,
    help="The GGUF file to ask.",
)
@click.option("--url", help="Ask a running server instead, e.g. http://127.0.0.1:8080/v1")
@click.option("--seed", default=7, show_default=True, help="Seed of the exam and the sampling.")
@click.option("--every", default=1, show_default=True, help="Ask only every n-th question.")
@click.option("--failures", is_flag=True, help="Print each reply that was not acceptable.")
def main(model: Path, url: str | None, seed: int, every: int, failures: bool) -> None:  # noqa: FBT001 - click
    """Print the share of held-out questions that the demo model answers acceptably."""
    random = Random(seed)  # noqa: S311  -- an exam is repeatable, not secret
    speaker: Speaker = Remote(url).reply if url else Talker.load(model).reply
    questions = [(probe, heat) for probe in exam(seed)[::every] for heat in TEMPERATURES]
    console = Console()
    results = []
    for probe, heat in track(questions, description="asking", console=console):
        result = put(probe, speaker, heat, random)
        if failures and not result.acceptable:
            console.print(describe(result), markup=False, highlight=False)
        results.append(result)
    console.print(table(results))


if __name__ == "__main__":
    main()
