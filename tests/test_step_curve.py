"""The dummy rows a step gets, against every choice there is."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from replica.step_curve import StepCurve

STREAMS = 7
NOTES_MS = {1: 8.5, 2: 14.5, 3: 22.4, 4: 22.8, 5: 28.6, 6: 36.9, 7: 41.5, 8: 38.4}


def cost_of(curve: StepCurve, ids: set[int]) -> float:
    """Return what llama.cpp's passes over these ids cost: one per run without a gap."""
    total, run = 0.0, 0
    for stream in range(max(ids) + 2):
        if stream in ids:
            run += 1
        elif run:
            total += curve.cost_s(run)
            run = 0
    return total


@given(
    st.lists(st.floats(0.1, 10), min_size=STREAMS, max_size=STREAMS),
    st.sets(st.integers(0, STREAMS - 1), min_size=1),
    st.sets(st.integers(0, STREAMS - 1)),
)
def test_no_other_filling_is_cheaper(costs: list[float], active: set[int], idle: set[int]) -> None:
    curve = StepCurve(dict(enumerate(costs, start=1)))
    idle -= active
    every = chain.from_iterable(combinations(sorted(idle), n) for n in range(len(idle) + 1))
    least = min(cost_of(curve, active | set(dummies)) for dummies in every)
    chosen = curve.filling(active, idle)

    assert set(chosen) <= idle
    assert abs(cost_of(curve, active | set(chosen)) - least) < 1e-9


def test_seven_rows_become_eight_where_eight_cost_less() -> None:
    curve = StepCurve(NOTES_MS)

    assert (7,) == curve.filling(range(7), [7])
    assert () == curve.filling(range(6), [6])


def test_a_gap_is_closed_rather_than_read_the_weights_twice() -> None:
    curve = StepCurve(NOTES_MS)

    assert (2,) == curve.filling([0, 1, 3], [2, 4, 5])


def test_a_wide_gap_stays_open() -> None:
    curve = StepCurve(NOTES_MS)

    assert () == curve.filling([0, 7], range(1, 7))


def test_costs_between_measured_rows_are_interpolated_and_beyond_them_proportional() -> None:
    curve = StepCurve({1: 1.0, 3: 2.0})

    assert [1.0, 1.5, 2.0, 4.0] == [curve.cost_s(rows) for rows in (1, 2, 3, 6)]


def test_an_answer_is_remembered() -> None:
    curve = StepCurve(NOTES_MS)

    assert curve.filling([0, 2], [1]) is curve.filling({2, 0}, {1})
