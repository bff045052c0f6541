"""What was measured, and what it comes to: medians, ratios, targets met or missed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Literal

from tests.peers.servers import NAMES, OURS, THEIRS

MEAN = "geometric mean"


@dataclass(frozen=True)
class Target:
    """A bound on our own value, or on its ratio to theirs; and on the mean of a column's ratios."""

    limit: float
    of: Literal["ours", "ratio"]
    mean: float | None = None


@dataclass(frozen=True)
class Metric:
    """A value with a name; less of it is better, unless `more` is."""

    name: str
    unit: str
    target: Target | None = None
    more: bool = False

    def meets(self, value: float, limit: float) -> bool:
        return value >= limit if self.more else value <= limit


@dataclass(frozen=True)
class Sample:
    """One value of one block."""

    model: str
    scenario: str
    case: str
    server: str
    metric: str
    round: int
    value: float


@dataclass(frozen=True)
class Line:
    """A metric in one case: medians per server, and ours against the better of theirs."""

    model: str
    scenario: str
    metric: Metric
    case: str
    medians: dict[str, float]
    ratio: float | None
    limit: float | None
    met: bool | None


def lines(samples: Sequence[Sample], model: str, scenario: str, metric: Metric) -> list[Line]:
    """Return a metric's line for every case, and the geometric mean where there is a target."""
    ours = [s for s in samples if (s.model, s.scenario, s.metric) == (model, scenario, metric.name)]
    cases = list(dict.fromkeys(sample.case for sample in ours))
    rows = []
    for case in sorted(cases, key=lambda name: (len(name), name)):
        medians = {
            server: median(values)
            for server in NAMES
            if (values := [s.value for s in ours if (s.case, s.server) == (case, server)])
        }
        rows.append(_line(model, scenario, metric, case, medians))
    ratios = [row.ratio for row in rows if row.ratio]
    if metric.target and metric.target.mean and len(ratios) == len(rows) > 1:
        mean, limit = geometric_mean(ratios), metric.target.mean
        met = metric.meets(mean, limit)
        rows.append(Line(model, scenario, metric, MEAN, {}, mean, limit, met))
    return rows


def _line(model: str, scenario: str, metric: Metric, case: str, medians: dict[str, float]) -> Line:
    theirs = [medians[name] for name in THEIRS if name in medians]
    best = (max if metric.more else min)(theirs, default=0.0)
    mine = medians.get(OURS)
    ratio = mine / best if mine is not None and best else None
    target = metric.target
    judged = None if target is None else ratio if target.of == "ratio" else mine
    met = metric.meets(judged, target.limit) if target and judged is not None else None
    limit = target.limit if target else None
    return Line(model, scenario, metric, case, medians, ratio, limit, met)
