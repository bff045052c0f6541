"""Which replica a policy chooses: load, then cache, then turns."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import REASONS, Candidate, Decision, least_loaded


def candidate(
    replica_id: str, inflight: int = 0, slots: int = 4, matched: int = 0, chosen_at: int = 0
) -> Candidate:
    return Candidate(replica_id, inflight, slots, matched, chosen_at)


candidates = st.lists(
    st.builds(
        Candidate,
        replica_id=st.integers(0, 99).map(str),
        inflight=st.integers(0, 3),
        slots=st.integers(4, 8),
        matched_blocks=st.integers(0, 3),
        chosen_at=st.integers(0, 9),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda candidate: candidate.replica_id,
)


def test_one_candidate_is_taken_whatever_it_holds() -> None:
    assert Decision("a", "only") == least_loaded([candidate("a", inflight=3, matched=2)])


def test_the_cache_does_not_outweigh_load() -> None:
    """
    A shared system prompt must not send every request to one replica while another idles.
    """
    hot = candidate("hot", inflight=1, matched=9)

    assert Decision("idle", "least_loaded") == least_loaded([hot, candidate("idle")])


def test_load_is_a_share_of_the_slots() -> None:
    small = candidate("small", inflight=1, slots=2)
    large = candidate("large", inflight=2, slots=8)

    assert Decision("large", "least_loaded") == least_loaded([small, large])


def test_among_equally_loaded_the_cache_decides() -> None:
    cold = candidate("cold", chosen_at=1)
    warm = candidate("warm", matched=1, chosen_at=2)
    warmer = candidate("warmer", matched=2, chosen_at=3)

    assert Decision("warmer", "prefix") == least_loaded([cold, warm, warmer])


def test_equal_shares_of_different_slots_are_equal() -> None:
    half = candidate("half", inflight=1, slots=2)
    also = candidate("also", inflight=3, slots=6, matched=1)

    assert Decision("also", "prefix") == least_loaded([half, also])


def test_ties_take_turns() -> None:
    recent = candidate("a", chosen_at=5)
    older = candidate("b", chosen_at=4)

    assert Decision("b", "turn") == least_loaded([recent, older])


def test_the_first_turn_goes_by_name() -> None:
    for order in itertools.permutations([candidate("a"), candidate("b"), candidate("c")]):
        assert Decision("a", "turn") == least_loaded(order)


def test_equal_caches_take_turns_too() -> None:
    recent = candidate("a", matched=3, chosen_at=2)
    older = candidate("b", matched=3, chosen_at=1)

    assert Decision("b", "prefix") == least_loaded([recent, older])


@given(candidates.flatmap(lambda offered: st.tuples(st.just(offered), st.permutations(offered))))
def test_the_choice_is_the_least_loaded_whatever_the_order(
    orders: tuple[list[Candidate], list[Candidate]],
) -> None:
    offered, shuffled = orders
    decision = least_loaded(offered)
    loads = {c.replica_id: c.inflight / c.slots for c in offered}

    assert min(loads.values()) == loads[decision.replica_id]
    assert decision == least_loaded(shuffled)
    assert decision.reason in REASONS


def test_nobody_to_choose_from_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        least_loaded([])
