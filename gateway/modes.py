"""The modes a machine can serve in, and which replicas each one uses."""

from enum import Enum


class Mode(Enum):
    """How the machine's placement domains are divided among replicas."""

    SINGLE = "single"
    """One replica on one domain; the others rest."""
    DATA_PARALLEL = "data-parallel"
    """A replica per domain; requests are divided among them."""
    SPAN = "span"
    """One replica over all domains, its memory interleaved."""


def choose(asked: str, domains: int) -> tuple[Mode, str]:
    """Return the mode for `--mode` and the sentence that explains it."""
    assert domains > 0
    if asked != "auto":
        return Mode(asked), f"--mode {asked}"
    if domains == 1:
        return Mode.SINGLE, "one placement domain"
    return Mode.DATA_PARALLEL, f"{domains} placement domains, and no measured crossover"
