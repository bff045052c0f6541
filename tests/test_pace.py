"""How long steps are expected to take, learned from steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.pace import CHUNK_STEP_TOKENS, SMOOTHING, Pace
from replica.wire import EnginePhase

DECODE, PREFILL = EnginePhase.DECODE, EnginePhase.PREFILL


def paced(*steps: tuple[EnginePhase, int, float]) -> Pace:
    pace = Pace()
    for phase, rows, seconds in steps:
        pace.observe(phase, rows, seconds)
    return pace


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
def test_nothing_is_expected_before_anything_was_seen(phase: EnginePhase) -> None:
    assert 0.0 == Pace().expect(phase, 8)


def test_the_first_step_seen_is_believed() -> None:
    assert 0.3 == paced((DECODE, 4, 0.3)).expect(DECODE, 4)


def test_newer_steps_move_the_expectation_smoothly() -> None:
    pace = paced((DECODE, 4, 1.0), (DECODE, 4, 2.0))
    assert 1.0 + SMOOTHING == pytest.approx(pace.expect(DECODE, 4))


def test_prompts_are_expected_by_their_length() -> None:
    pace = paced((PREFILL, 100, 1.0))
    assert 2.0 == pytest.approx(pace.expect(PREFILL, 200))
    assert 0.5 == pytest.approx(pace.expect(PREFILL, 50))


def test_decode_steps_are_expected_from_the_nearest_row_count() -> None:
    """Steps cost by the tile of rows, not by the row: 8 rows cost less than 7."""
    pace = paced((DECODE, 7, 0.041), (DECODE, 8, 0.038))
    assert 0.041 == pace.expect(DECODE, 7)
    assert 0.038 == pace.expect(DECODE, 8)
    assert 0.041 == pace.expect(DECODE, 2), "fewer rows are not expected to cost less"
    assert 0.038 * 2 == pytest.approx(pace.expect(DECODE, 16)), "more rows are, in proportion"


def test_between_two_equally_near_the_smaller_is_taken() -> None:
    pace = paced((DECODE, 6, 0.7), (DECODE, 4, 0.4))
    assert 0.4 * 5 / 4 == pytest.approx(pace.expect(DECODE, 5))


def test_the_phases_do_not_mix() -> None:
    assert 0.0 == paced((DECODE, 8, 1.0)).expect(PREFILL, 8)
    assert 0.0 == paced((PREFILL, 8, 1.0)).expect(DECODE, 8)


# How much of a prompt may be read between two tokens of a stream


def test_nothing_is_said_of_chunks_before_both_phases_were_seen() -> None:
    for step in ((DECODE, 1, 1.0), (PREFILL, 1, 1.0)):
        assert paced(step).chunk_tokens(1, None) is None


def test_a_chunk_fills_the_gap_beside_the_decode_step() -> None:
    pace = paced((DECODE, 4, 0.1), (PREFILL, 100, 0.1))
    assert 400 == pace.chunk_tokens(4, 0.5), "0.1 s of the gap are the step's own"
    assert 224 == pace.chunk_tokens(4, None), "3.3 steps, less the one; whole tiles of 16"


def test_a_chunk_is_never_smaller_than_a_tile() -> None:
    """Otherwise a prompt beside slow streams would never be read."""
    pace = paced((DECODE, 4, 1.0), (PREFILL, 1, 1.0))
    assert CHUNK_STEP_TOKENS == pace.chunk_tokens(4, 0.5)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.sampled_from([DECODE, PREFILL]))
def test_the_expectation_stays_within_what_was_seen(
    seconds: list[float], phase: EnginePhase
) -> None:
    pace = paced(*((phase, 3, s) for s in seconds))
    low, high = min(seconds), max(seconds)
    assert low * 0.999 <= pace.expect(phase, 3) <= high * 1.001
