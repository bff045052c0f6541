"""What a decode step costs by its rows, and which rows to add so that it costs least.

Pure. llama.cpp computes a step over split streams in passes: one for every run of consecutive
stream ids. A pass reads all weights, so a gap between ids is expensive; and its kernels work in
tiles, so that more rows can cost less than fewer. A dummy row on an idle stream closes a gap or
completes a tile; where that pays follows from the measured curve alone.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

FILLINGS_MAX = 4096
"""Remembered answers; the sets of active streams repeat from step to step."""


class _Best(NamedTuple):
    """The least cost of serving the active ids below some id, and the dummy ids it takes."""

    cost_s: float
    dummies: tuple[int, ...]


_IMPOSSIBLE = _Best(float("inf"), ())


class StepCurve:
    """Seconds of one pass by its rows, interpolated between the measured ones."""

    def __init__(self, measured_s: Mapping[int, float]) -> None:
        assert measured_s
        assert all(rows > 0 and cost > 0 for rows, cost in measured_s.items())
        self._costs_s = _interpolated(measured_s)
        self._fillings: dict[tuple[frozenset[int], frozenset[int]], tuple[int, ...]] = {}

    def __repr__(self) -> str:
        costs = enumerate(self._costs_s[1:], start=1)
        return ", ".join(f"{rows}: {cost * 1e3:.2f}" for rows, cost in costs)

    def cost_s(self, rows: int) -> float:
        """Return the expected seconds of a pass over `rows` consecutive streams."""
        assert rows > 0
        if rows < len(self._costs_s):
            return self._costs_s[rows]
        return self._costs_s[-1] * rows / (len(self._costs_s) - 1)

    def filling(self, active: Collection[int], idle: Collection[int]) -> tuple[int, ...]:
        """Return the idle ids that should get a dummy row, so that the step costs least."""
        key = (frozenset(active), frozenset(idle))
        assert key[0]
        assert key[0].isdisjoint(key[1])
        if key not in self._fillings:
            if len(self._fillings) >= FILLINGS_MAX:
                self._fillings.clear()
            self._fillings[key] = self._cheapest(*key).dummies
        return self._fillings[key]

    def _cheapest(self, active: frozenset[int], idle: frozenset[int]) -> _Best:
        """Choose the runs of ids, from the lowest id upwards.

        `ended[i]` serves the active ids below `i` with a run that ends right there; `closed[i]`
        leaves id `i - 1` out, so that a new run may begin at `i` without touching the last one.
        """
        usable = active | idle
        end = max(usable) + 1
        closed = [_Best(0.0, ())]
        ended = [_IMPOSSIBLE]
        for stop in range(1, end + 1):
            best = _IMPOSSIBLE
            first = stop - 1
            while first in usable:
                before = closed[first]
                cost_s = before.cost_s + self.cost_s(stop - first)
                if cost_s < best.cost_s:
                    dummies = [i for i in range(first, stop) if i in idle]
                    best = _Best(cost_s, (*before.dummies, *dummies))
                first -= 1
            skipped = _IMPOSSIBLE
            if stop - 1 not in active:
                skipped = min(closed[-1], ended[-1], key=_cost)
            ended.append(best)
            closed.append(skipped)
        return min(closed[-1], ended[-1], key=_cost)


def _cost(best: _Best) -> float:
    return best.cost_s


def _interpolated(measured_s: Mapping[int, float]) -> list[float]:
    """Return the cost by rows, from 0 to the most that were measured."""
    points = sorted(measured_s.items())
    fewest, cost_s = points[0]
    costs = [0.0] + [cost_s] * fewest
    for (left, left_s), (right, right_s) in pairwise(points):
        share = (right_s - left_s) / (right - left)
        costs += [left_s + share * (rows - left) for rows in range(left + 1, right + 1)]
    return costs
