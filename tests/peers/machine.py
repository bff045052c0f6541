"""How much of the machine others take while we measure.

A comparison on shared cores is worth what its quietest moments are: a block that others disturbed
is measured again, and when that does not help the output says so.
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_CPUS = 0.1
"""What others may take: a tenth of one core."""


@dataclass(frozen=True)
class Usage:
    """Processor time so far, in ticks: of everybody, and of this process and its descendants."""

    when: float
    everybody: int
    own: int

    def others_since(self, before: "Usage") -> float:
        """Return how many CPUs were taken by others, on average."""
        ticks = (self.everybody - before.everybody) - (self.own - before.own)
        return max(0.0, ticks / TICKS_PER_S / (self.when - before.when))


def usage() -> Usage:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    everybody = user + nice + system + irq + softirq + steal
    return Usage(time.monotonic(), everybody, _own_ticks())


def others(seconds: float = 0.5) -> float:
    """Watch for a moment, and return how many CPUs others take."""
    before = usage()
    time.sleep(seconds)
    return usage().others_since(before)


def wait_for_quiet(patience_s: float) -> float:
    """Return what others take, as soon as it is little or patience ends."""
    deadline = time.monotonic() + patience_s
    while (taken := others()) > QUIET_CPUS and time.monotonic() < deadline:
        time.sleep(1)
    return taken


def description() -> dict[str, object]:
    models = {
        line.partition(":")[2].strip()
        for line in (PROC / "cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def _own_ticks() -> int:
    """Count what we and our descendants used, and those of their children that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    family = grown = {os.getpid()}
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown}
        family |= grown
    return sum(ticks.get(pid, 0) for pid in family)
