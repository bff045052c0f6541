"""numaserve beside llama.cpp's own server: same cores, same model, same quantization, in one run.

    python -m tests.peers.engine --scenario all --plot engine.png

All servers stay up during a scenario and are asked in turn, in an order that chance decides, so
that whatever changes on the machine meanwhile changes for all of them. Nothing is asserted: the
report sets medians, ratios and targets side by side.
"""

import asyncio
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from random import Random

import click
from rich.console import Console
from rich.markup import escape

from tests.peers import machine, report
from tests.peers.llama_server import llama_server
from tests.peers.load import IncompleteError, together
from tests.peers.models import model_file, parse_name
from tests.peers.results import Line, Sample, lines
from tests.peers.scenarios import SCENARIOS, Block, Scenario, Values
from tests.peers.servers import Running, Setup, StartError, running

TRIES = 3
"""How often a block is measured again because others disturbed it."""

WIDTH_MIN = 100

console = Console()
if console.width < WIDTH_MIN:
    console = Console(width=WIDTH_MIN)


@dataclass(frozen=True)
class Run:
    """How thoroughly to measure."""

    rounds: int
    quick: bool
    patience_s: float
    random: Random


def compare(setup: Setup, model: str, name: str, run: Run) -> Iterator[Sample]:
    """Measure a scenario on all servers, block by block."""
    scenario = SCENARIOS[name]
    cases = scenario.quick_cases if run.quick else tuple(scenario.cases)
    console.print(f"[bold]{model}: {name}[/] — starting the servers")
    taken = machine.wait_for_quiet(run.patience_s)
    if taken > machine.QUIET_CPUS:
        console.print(f"  [yellow]others take {taken:.2f} CPUs while ours measures steps[/]")
    with running(setup, scenario.room) as servers:
        console.print(f"  ours computes with {servers.our_threads} of {len(servers.cpus)} threads")
        _warm_up(servers, run.random)
        for number in range(1 if run.quick else run.rounds):
            blocks = list(product(run.random.sample(cases, len(cases)), servers.addresses))
            for case, server in _servers_shuffled(blocks, run.random):
                values = _measure(servers, server, scenario, scenario.cases[case], run)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
                console.print(
                    f"  {number + 1}. {case}, {server}: {shown}", highlight=False, soft_wrap=True
                )
                for metric, value in values.items():
                    yield Sample(model, name, case, server, metric, number, value)


def _servers_shuffled(blocks: list[tuple[str, str]], random: Random) -> Iterator[tuple[str, str]]:
    """Keep a case's servers together in time, in an order of chance."""
    for case in dict.fromkeys(case for case, _ in blocks):
        same = [block for block in blocks if block[0] == case]
        yield from random.sample(same, len(same))


def _warm_up(servers: Running, random: Random) -> None:
    for address in servers.addresses.values():
        block = Block(address, servers.cpus, 2, random)
        streams = [block.stream(64, 32) for _ in range(block.size)]
        asyncio.run(together(streams))


def _measure(servers: Running, server: str, scenario: Scenario, size: int, run: Run) -> Values:
    """Measure one block, again if others took the CPUs meanwhile; keep the calmest."""
    calmest: tuple[float, Values] | None = None
    for _ in range(TRIES):
        machine.wait_for_quiet(run.patience_s)
        before = machine.usage()
        block = Block(servers.addresses[server], servers.cpus, size, run.random)
        values = asyncio.run(scenario.measure(block))
        taken = machine.usage().others_since(before)
        if calmest is None or taken < calmest[0]:
            calmest = (taken, values)
        if taken <= machine.QUIET_CPUS:
            break
    assert calmest
    if calmest[0] > machine.QUIET_CPUS:
        console.print(f"  [yellow]others took {calmest[0]:.2f} CPUs during this block[/]")
    return calmest[1]


def summary(samples: list[Sample]) -> list[Line]:
    measured = dict.fromkeys((sample.model, sample.scenario) for sample in samples)
    return [
        line
        for model, scenario in measured
        for metric in SCENARIOS[scenario].metrics
        for line in lines(samples, model, scenario, metric)
    ]


def _names(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    try:
        for name in names:
            parse_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return names


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice([*SCENARIOS, "all"]),
    multiple=True,
    default=("all",),
    show_default=True,
    help="Which situation to compare; may be given several times.",
)
@click.option(
    "--models",
    default="0.5B-Q4_0,0.5B-Q8_0,1B-Q4_0,1B-Q8_0",
    callback=_names,
    show_default=True,
    help="Shape and quantization, separated by commas; tiny-Q4_0 is for trying out.",
)
@click.option("--vocabulary", default=32_000, show_default=True, help="Tokens the models know.")
@click.option("--rounds", default=3, show_default=True, help="Blocks per case and server.")
@click.option("--quick", is_flag=True, help="One round, fewer cases.")
@click.option("--node", default=0, show_default=True, help="NUMA node on which all compute.")
@click.option(
    "--our-options",
    default="--speculation off",
    show_default=True,
    help="More options for numaserve. Random models repeat themselves: that would flatter guesses.",
)
@click.option("--their-options", default="", help="More options for llama-server.")
@click.option("--patience", default=60.0, show_default=True, help="Seconds to wait for quiet CPUs.")
@click.option("--seed", default=1, show_default=True, help="Of the prompts and the order.")
@click.option(
    "--llama-server",
    "program",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The program to compare with. [default: built from the binding's source, once]",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path.home() / ".cache/numaserve/peers",
    help="Where models, builds and logs are kept. [default: ~/.cache/numaserve/peers]",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write this file.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Also draw this PNG.")
def main(  # noqa: PLR0913  # one parameter per option is how click calls
    scenarios: tuple[str, ...],
    models: tuple[str, ...],
    vocabulary: int,
    rounds: int,
    *,
    quick: bool,
    node: int,
    our_options: str,
    their_options: str,
    patience: float,
    seed: int,
    program: Path | None,
    cache: Path,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    chosen = tuple(SCENARIOS) if "all" in scenarios else scenarios
    program = program or llama_server(cache)
    run = Run(rounds, quick, patience, Random(seed))
    # Asked to end, end the servers as well.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    ours, theirs = (tuple(shlex.split(words)) for words in (our_options, their_options))
    samples: list[Sample] = []
    facts = {"begun": datetime.now(UTC).isoformat(), "arguments": sys.argv[1:]}
    for model, name in product(models, chosen):
        file = model_file(cache, model, vocabulary)
        logs = cache / "logs" / f"{model}-{name}"
        logs.mkdir(parents=True, exist_ok=True)
        setup = Setup(program, file, vocabulary, node, ours, theirs, logs)
        try:
            samples += compare(setup, model, name, run)  # what came before a failure stays
        except (IncompleteError, StartError) as error:
            console.print(f"[red]{model}: {name} ended early[/]: {escape(str(error))}")
        if json_file:
            report.write_json(json_file, facts | machine.description(), samples, summary(samples))
    report.show(console, summary(samples))
    if plot_file:
        report.plot(plot_file, summary(samples))


if __name__ == "__main__":
    main()
