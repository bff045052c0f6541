"""Choose a replica. A policy is a function from candidates to a decision: no clock, no I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of a replica that could take the request now."""

    replica_id: str
    inflight: int
    slots: int
    matched_blocks: int
    """Leading blocks of the prompt that its KV cache holds."""
    chosen_at: int
    """Number of the decision that chose it last; 0 for never."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why, in a word fit for a metric's label."""

    replica_id: str
    reason: str


Policy = Callable[[Sequence[Candidate]], Decision]


def least_loaded(candidates: Sequence[Candidate]) -> Decision:
    """Follow the load; among equals the cache; among equals again, take turns."""
    assert candidates
    if len(candidates) == 1:
        return Decision(candidates[0].replica_id, "only")
    load = min(c.inflight / c.slots for c in candidates)
    idlest = [c for c in candidates if c.inflight / c.slots == load]
    best = min(idlest, key=lambda c: (-c.matched_blocks, c.chosen_at, c.replica_id))
    if len(idlest) == 1:
        return Decision(best.replica_id, "least_loaded")
    return Decision(best.replica_id, "prefix" if best.matched_blocks else "turn")


REASONS = ("only", "least_loaded", "prefix", "turn")
