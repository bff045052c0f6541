"""Measure at start what the scheduler wants to know of this model on these cores.

Costs about `BUDGET_S`, and nothing is left of it in the KV cache. Knows no requests.
"""

import logging
import time
from collections.abc import Callable

from replica.pace import Pace
from replica.step_curve import StepCurve
from replica.wire import EnginePhase

log = logging.getLogger(__name__)

BUDGET_S = 2.0
REPEATS_MAX = 5
THREAD_REPEATS = 5
THREAD_PROMPT_TOKENS = 64
PROMPT_TOKENS = 128
"""The chunk whose time stands for the reading of prompts."""


def rows_to_measure(most: int) -> list[int]:
    """Return row counts that show the tiles of llama.cpp's kernels: where more may cost less."""
    wanted = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, *range(40, most, 8), most]
    return sorted({rows for rows in wanted if rows <= most})


def measure(
    step: Callable[[int], None],
    prompt: Callable[[int], None],
    most: int,
    clock: Callable[[], float] = time.monotonic,
) -> Pace:
    """Time steps of up to `most` rows, and a chunk of a prompt.

    Rounds go over all row counts, so that a disturbance does not hit one of them alone, and the
    best time of each counts: what the machine does when nobody disturbs it. The first round is not
    cut short by the budget: without it there is no curve.
    """
    counts = rows_to_measure(most)
    seconds: dict[int, list[float]] = {rows: [] for rows in counts}
    started = clock()
    step(1)  # the first step of all touches buffers
    for _ in range(REPEATS_MAX):
        for rows in counts:
            seconds[rows].append(_timed(step, rows, clock))
        if clock() - started > BUDGET_S:
            break
    prompt_s = _timed(prompt, PROMPT_TOKENS, clock)
    curve = StepCurve({rows: min(times) for rows, times in seconds.items()})
    pace = Pace(curve)
    pace.observe(EnginePhase.PREFILL, PROMPT_TOKENS, prompt_s)
    for rows in counts:
        pace.observe(EnginePhase.DECODE, rows, curve.cost_s(rows))
    log.info("a step costs, in ms by rows: %s", curve)
    return pace


def best_threads(
    most: int,
    use: Callable[[int], None],
    step: Callable[[int], None],
    prompt: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return the number of threads, up to `most`, that computes fastest; `use` applies one.

    The last threads may only fight for memory bandwidth. Judged by one row, which is bound by
    bandwidth, and by a chunk of a prompt, which is bound by arithmetic, equally. When this returns,
    the best number is in use.
    """
    candidates = sorted({most, max(1, most - 1), max(1, most * 3 // 4), max(1, most // 2)})
    seconds: dict[int, float] = {}
    for threads in reversed(candidates):
        use(threads)
        step(1)
        rows = [_timed(step, 1, clock) for _ in range(THREAD_REPEATS)]
        chunks = [_timed(prompt, THREAD_PROMPT_TOKENS, clock) for _ in range(2)]
        seconds[threads] = min(rows) * min(chunks)
    best = min(candidates, key=lambda threads: (seconds[threads], -threads))
    use(best)
    log.info("%d of %d threads compute fastest", best, most)
    return best


def _timed(work: Callable[[int], None], size: int, clock: Callable[[], float]) -> float:
    started = clock()
    work(size)
    return max(clock() - started, 1e-9)
