"""Tables for the terminal, a file for programs, a picture for people."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.peers.results import MEAN, Line, Sample
from tests.peers.servers import NAMES, OURS

COLOURS = dict(zip(NAMES, ("tab:blue", "tab:orange", "tab:red"), strict=True))
LOGARITHMIC_FROM = 20
"""How far apart bars must be for an axis that shows the small ones too."""


def show(console: Console, lines: Iterable[Line]) -> None:
    """Print one table per model and scenario."""
    for (model, scenario), rows in groupby(lines, lambda line: (line.model, line.scenario)):
        table = Table(title=f"{model}: {scenario}; numaserve, llama-server split and unified")
        table.add_column("metric", no_wrap=True)
        table.add_column("case", no_wrap=True)
        for heading in (*NAMES, "ratio", "target"):
            table.add_column(heading, justify="right", no_wrap=True)
        for _, same in groupby(rows, lambda line: line.metric.name):
            for row in same:
                table.add_row(*_cells(row))
            table.add_section()
        console.print(table)


def _cells(line: Line) -> list[str]:
    medians = [_number(line.medians.get(server)) for server in NAMES]
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}x"
    return [f"{line.metric.name}, {line.metric.unit}", line.case, *medians, ratio, _target(line)]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _target(line: Line) -> str:
    target = line.metric.target
    if target is None or line.limit is None:
        return ""
    sign = "≥" if line.metric.more else "≤"
    what = "ratio" if target.of == "ratio" else "ours"
    text = f"{what} {sign} {line.limit:g}"
    if line.met is None:
        return text
    return f"[green]{text} ✓[/]" if line.met else f"[red]{text} ✗[/]"


def write_json(
    path: Path, facts: Mapping[str, object], samples: Sequence[Sample], lines: Sequence[Line]
) -> None:
    document = {
        **facts,
        "lines": [asdict(line) for line in lines],
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Draw every metric that has a target, one panel each; needs matplotlib."""
    drawn = [line for line in lines if line.metric.target and line.case != MEAN]
    panels = [
        list(rows)
        for _, rows in groupby(drawn, lambda line: (line.model, line.scenario, line.metric.name))
    ]
    if not panels:
        return
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    # By name: only whoever wants a picture has it.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(5.5 * columns, 3.6 * height), layout="constrained"
    )
    axes = figure.subplots(height, columns, squeeze=False).flat
    for axis, rows in zip(axes, panels, strict=False):
        _panel(axis, rows)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    handles, labels = next(iter(figure.axes)).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(NAMES))
    figure.savefig(path, dpi=110)


def _panel(axis: Any, rows: Sequence[Line]) -> None:  # noqa: ANN401  # matplotlib is optional
    """Draw bars per case and server; the ratio stands on ours."""
    width = 0.8 / len(NAMES)
    for place, server in enumerate(NAMES):
        heights = [row.medians.get(server, 0.0) for row in rows]
        positions = [index + (place - 1) * width for index in range(len(rows))]
        bars = axis.bar(positions, heights, width, label=server, color=COLOURS[server])
        if server == OURS:
            ratios = ["" if row.ratio is None else f"{row.ratio:.2f}x" for row in rows]
            axis.bar_label(bars, ratios, fontsize=7)
    metric = rows[0].metric
    assert metric.target
    if metric.target.of == "ours":
        axis.axhline(metric.target.limit, color="black", linestyle="--", linewidth=1)
    axis.set_title(f"{rows[0].model}: {rows[0].scenario}", fontsize=10)
    axis.set_ylabel(f"{metric.name}, {metric.unit}", fontsize=8)
    axis.set_xticks(range(len(rows)), [row.case for row in rows], fontsize=8)
    shown = [value for row in rows for value in row.medians.values() if value > 0]
    if shown and max(shown) > LOGARITHMIC_FROM * min(shown):
        axis.set_yscale("log")
    axis.margins(y=0.1)
