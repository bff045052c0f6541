"""The situations in which the servers are compared, and what is held against what.

A scenario's `measure` puts one load on one server and returns named values. Whatever it sends is
new to the server: prompts come from a random stream that never repeats.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import median

from tests.peers.load import Address, Stream, check, first_token_ms, in_turn, rate, together
from tests.peers.models import token_ids
from tests.peers.results import Metric, Target
from tests.peers.servers import Room

Values = dict[str, float]


@dataclass(frozen=True)
class Block:
    """One server under one load: a case of a scenario, with its size."""

    server: Address
    cpus: tuple[int, ...]
    size: int
    random: Random

    def stream(self, prompt_tokens: int, tokens_max: int) -> Stream:
        return Stream(self.server, self.server.prompt(self.random, prompt_tokens), tokens_max)


@dataclass(frozen=True)
class Scenario:
    """A situation in its cases (name and size), and the metrics it yields."""

    room: Room
    cases: Mapping[str, int]
    quick_cases: tuple[str, ...]
    measure: Callable[[Block], Coroutine[None, None, Values]]
    metrics: tuple[Metric, ...]


async def concurrency(block: Block) -> Values:
    """Distinct short prompts, short answers, `size` clients."""
    waves = ceil(6 / block.size)
    streams = [block.stream(64, 48) for _ in range(waves * block.size)]
    await in_turn(streams, block.size)
    check(streams)
    gaps = [gap for stream in streams for _, gap in stream.gaps]
    return {
        "output": rate(streams),
        "TTFT p50": first_token_ms(streams),
        "ITL p50": 1000 * median(gaps),
        "longest gap": 1000 * max(gaps),
    }


async def stall(block: Block) -> Values:
    """A prompt of `size` tokens arrives while four streams decode."""
    streams = [block.stream(64, 1500) for _ in range(4)]
    newcomer = block.stream(block.size, 16)
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    try:
        await _until_all_have(streams, 40)
        begun = time.perf_counter()
        await newcomer.run()
        await _until_all_have(streams, 8, after=time.perf_counter())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    check([newcomer])
    gaps = [gap for stream in streams for gap in stream.gaps]
    # The first tokens come one by one, between the prompts of the others.
    together_from = max(stream.times[8] for stream in streams)
    before = median(gap for when, gap in gaps if together_from < when < begun)
    longest = max(gap for when, gap in gaps if when >= begun)
    return {
        "longest/median gap": longest / before,
        "median gap before": 1000 * before,
        "longest gap": 1000 * longest,
        "newcomer's TTFT": 1000 * newcomer.first_after_s,
    }


async def _until_all_have(streams: list[Stream], arrivals: int, after: float = 0.0) -> None:
    while True:
        counts = [sum(when > after for when, _ in stream.arrivals) for stream in streams]
        if min(counts) >= arrivals or any(stream.error for stream in streams):
            return
        await asyncio.sleep(0.02)


async def prefix(block: Block) -> Values:
    """`size` clients at once bring one new system prompt; then they come again."""
    system = block.server.prompt(block.random, 1000)
    values = {}
    for round_name in ("first round", "second round"):
        streams = [
            Stream(block.server, system + block.server.prompt(block.random, 50), 16)
            for _ in range(block.size)
        ]
        await together(streams)
        check(streams)
        values[f"TTFT p50, {round_name}"] = first_token_ms(streams)
    return values


async def neighbour(block: Block) -> Values:
    """`size` clients, alone and then beside a process that never rests on one of the CPUs."""
    rates = []
    for beside in (False, True):
        streams = [block.stream(64, 48) for _ in range(block.size * 2)]
        with _busy_neighbour(block.cpus[-1] if beside else None):
            await in_turn(streams, block.size)
        check(streams)
        rates.append(rate(streams))
    alone, disturbed = rates
    return {"share left": disturbed / alone, "alone": alone, "disturbed": disturbed}


@contextmanager
def _busy_neighbour(cpu: int | None) -> Generator[None]:
    if cpu is None:
        yield
        return
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()


async def turns(block: Block) -> Values:
    """`size` conversations of three turns, more than there are streams to hold them."""
    prompts = [block.server.prompt(block.random, 512) for _ in range(block.size)]
    later: list[Stream] = []
    for turn in range(3):
        streams = [Stream(block.server, prompt, 32) for prompt in prompts]
        await in_turn(streams, 4)
        check(streams)
        if turn:
            later += streams
        prompts = [
            [*stream.prompt, *token_ids(stream.text), *block.server.prompt(block.random, 16)]
            for stream in streams
        ]
    asked = sum(stream.usage["prompt_tokens"] for stream in later)
    cached = sum(stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in later)
    return {"recomputed": 100 * (asked - cached) / asked, "TTFT p50": first_token_ms(later)}


async def overfull(block: Block) -> Values:
    """As many clients as fit, and then `size`: four times what there is room for."""
    fitting = [block.stream(120, 128) for _ in range(16)]
    await in_turn(fitting, 8)
    check(fitting)
    crowd = [block.stream(120, 128) for _ in range(block.size)]
    await together(crowd)
    peak, crowded = rate(fitting), rate(crowd)
    return {
        "share of the peak": crowded / peak,
        "failed": float(sum(not stream.complete for stream in crowd)),
        "peak": peak,
        "overfull": crowded,
    }


SCENARIOS = {
    "concurrency": Scenario(
        Room(parallel=16, ctx=256),
        {f"c={clients}": clients for clients in (1, 2, 3, 4, 6, 8, 12, 14, 16)},
        ("c=1", "c=4", "c=16"),
        concurrency,
        (
            Metric("output", "tok/s", target=Target(1.0, of="ratio", mean=1.1), more=True),
            Metric("TTFT p50", "ms"),
            Metric("ITL p50", "ms"),
            Metric("longest gap", "ms"),
        ),
    ),
    "stall": Scenario(
        Room(parallel=8, ctx=2560),
        {"2,000 tokens": 2000},
        ("2,000 tokens",),
        stall,
        (
            Metric("longest/median gap", "x", target=Target(4.0, of="ours")),
            Metric("newcomer's TTFT", "ms", target=Target(1.5, of="ratio")),
            Metric("median gap before", "ms"),
            Metric("longest gap", "ms"),
        ),
    ),
    "prefix": Scenario(
        Room(parallel=8, ctx=1280),
        {"8 clients": 8},
        ("8 clients",),
        prefix,
        (
            Metric("TTFT p50, first round", "ms", target=Target(0.25, of="ratio")),
            Metric("TTFT p50, second round", "ms", target=Target(1.0, of="ratio")),
        ),
    ),
    "neighbour": Scenario(
        Room(parallel=4, ctx=256),
        {"c=1": 1, "c=4": 4},
        ("c=1", "c=4"),
        neighbour,
        (
            Metric("share left", "x", target=Target(0.5, of="ours"), more=True),
            Metric("alone", "tok/s", more=True),
            Metric("disturbed", "tok/s", more=True),
        ),
    ),
    "turns": Scenario(
        Room(parallel=4, ctx=768),
        {"6 conversations": 6},
        ("6 conversations",),
        turns,
        (
            Metric("recomputed", "%", target=Target(10.0, of="ours")),
            Metric("TTFT p50", "ms"),
        ),
    ),
    "overfull": Scenario(
        Room(parallel=8, ctx=256, unified_slots=32),
        {"32 clients": 32},
        ("32 clients",),
        overfull,
        (
            Metric("share of the peak", "x", target=Target(0.9, of="ours"), more=True),
            Metric("failed", "requests", target=Target(0.0, of="ours")),
            Metric("peak", "tok/s", more=True),
            Metric("overfull", "tok/s", more=True),
        ),
    ),
}
