"""The modes a machine can serve in, and which placement domains each one uses."""

from collections.abc import Sequence
from enum import Enum

from replica.placement import PlacementDomain


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


def domains_of(mode: Mode, domains: Sequence[PlacementDomain]) -> list[PlacementDomain]:
    """Return the domains that get a replica in this mode."""
    match mode:
        case Mode.SINGLE:
            return list(domains[:1])
        case Mode.DATA_PARALLEL:
            return list(domains)
        case Mode.SPAN:
            return [_joined(domains)]


def _joined(domains: Sequence[PlacementDomain]) -> PlacementDomain:
    return PlacementDomain(
        index=0,
        nodes=tuple(sorted({node for domain in domains for node in domain.nodes})),
        compute_cpus=tuple(cpu for domain in domains for cpu in domain.compute_cpus),
        housekeeping_cpus=tuple(cpu for domain in domains for cpu in domain.housekeeping_cpus),
        idle_siblings=tuple(cpu for domain in domains for cpu in domain.idle_siblings),
        virtual=any(domain.virtual for domain in domains),
        interleaved=True,
    )
