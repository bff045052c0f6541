"""Every token has the probability that the definition gives it, and is drawn that often.

The reference is the definition written down slowly, in float64 and with a full sort; it shares no
line with the code under test. Where rounding decides on which side of a cut a token falls the
two may differ, so such cases are set aside by `margin`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replica.sampling import (
    BLOCK_TOKENS,
    FEW,
    NEGLIGIBLE_MASS,
    Sampler,
    candidates,
    uniform,
)
from replica.wire import Sampling

Row = NDArray[np.float32]


def row_of(*logits: float) -> Row:
    return np.array(logits, np.float32)


def asked(**fields: Any) -> Sampling:  # noqa: ANN401 - the fields of Sampling
    return Sampling(**{"seed": 7, **fields})


def drawn(sampling: Sampling, row: Row, index: int = 0) -> int:
    sampler = Sampler(sampling, [], ignore_eos=False, prompt=[], completion=[])
    return sampler.draw(row.copy(), index).token_id


def reference(row: Row, sampling: Sampling) -> tuple[NDArray[np.float64], float]:
    """The probability of every token, and how near (relatively) the nearest cut came to one."""
    logits = row.astype(np.float64)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    margin = math.inf
    if sampling.min_p > 0:
        margin = float(np.abs(weights / sampling.min_p - 1).min())
        weights[weights < sampling.min_p] = 0
    order = sorted(range(row.size), key=lambda token_id: (-logits[token_id], token_id))
    if sampling.top_k > 0:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        sums = np.cumsum(weights[order])
        wanted = sampling.top_p * sums[-1]
        margin = min(margin, float(np.abs(sums / sums[-1] - sampling.top_p).min()))
        weights[order[int(np.argmax(sums >= wanted)) + 1 :]] = 0
    weights /= weights.sum()
    return weights, margin


def distribution(row: Row, sampling: Sampling) -> NDArray[np.float64]:
    ids, weights = candidates(row.copy(), float(row.max()), sampling)
    chances = np.zeros(row.size)
    chances[slice(None) if ids is None else ids] = weights
    chances /= chances.sum()
    return chances


def survivors(
    row: Row,
    **fields: Any,  # noqa: ANN401 - fields of Sampling
) -> list[int]:
    return [int(token_id) for token_id in np.flatnonzero(distribution(row, asked(**fields)))]


def steep(size: int, seed: int) -> Row:
    """A few tokens dominate, the rest is noise: what a model says mid-sentence."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 2.5, size).astype(np.float32)
    row[rng.choice(size, 6, replace=False)] = [20, 19, 18.5, 17, 15, 15]
    return row


def flat(size: int, seed: int) -> Row:
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)


coarse = st.integers(-40, 40).map(lambda eighths: eighths / 8)  # ties are common
small_rows = st.lists(coarse | st.just(-math.inf), min_size=1, max_size=120).filter(
    lambda row: max(row) > -math.inf
)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0, 1) | st.just(1.0),
    top_k=st.integers(0, 130),
    min_p=st.floats(1e-6, 1) | st.just(0.0),
)


@settings(max_examples=400, deadline=None)
@given(small_rows, samplings)
def test_every_probability_is_the_definitions(logits: list[float], sampling: Sampling) -> None:
    row = row_of(*logits)
    expected, margin = reference(row, sampling)
    assume(margin > 1e-5)
    np.testing.assert_allclose(distribution(row, sampling), expected, atol=1e-6)


@pytest.mark.parametrize("make", [steep, flat])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0),
        Sampling(seed=0, temperature=0.2),
        Sampling(seed=0, temperature=3.0, top_p=0.9),
        Sampling(seed=0, top_p=0.95),
        Sampling(seed=0, top_p=0.3),
        Sampling(seed=0, top_k=40),
        Sampling(seed=0, top_k=40, top_p=0.9),
        Sampling(seed=0, top_k=600, top_p=0.9),
        Sampling(seed=0, top_k=600, top_p=0.9, min_p=0.01),
        Sampling(seed=0, top_k=5000, top_p=0.5),
        Sampling(seed=0, min_p=0.05),
        Sampling(seed=0, min_p=1e-6, temperature=2.0, top_p=0.97),
    ],
    ids=repr,
)
def test_shortcuts_on_a_large_vocabulary_change_no_probability(
    make: Callable[[int, int], Row], sampling: Sampling
) -> None:
    """Tokens within float32's reach of a cut may fall on either side. 20011 is prime: neither
    blocks nor groups divide it."""
    for seed in range(3):
        row = make(20_011, seed)
        expected = reference(row, sampling)[0]
        actual = distribution(row, sampling)
        cut = float(row[expected > 0].min())
        clear = np.abs(row - cut) > 1e-5
        assert np.count_nonzero(~clear) < 5
        np.testing.assert_allclose(actual[clear], expected[clear], rtol=2e-5, atol=1e-9)
        assert abs(np.count_nonzero(actual[~clear]) - np.count_nonzero(expected[~clear])) <= 1


def test_the_neglected_tail_is_within_its_bound() -> None:
    row = np.full(8192, -15.0, np.float32)
    row[:10] = 0
    sampling = Sampling(seed=0, temperature=0.5)
    lost = reference(row, sampling)[0][distribution(row, sampling) == 0]
    assert 8182 == lost.size
    assert 0 < lost.sum() < NEGLIGIBLE_MASS


def test_tokens_that_matter_together_are_not_neglected() -> None:
    row = np.full(8192, -25.0, np.float32)
    row[0] = 0
    chances = distribution(row, Sampling(seed=0))
    assert 8192 == np.count_nonzero(chances)
    assert 8191 * math.exp(-25) == pytest.approx(chances[1:].sum() / chances[0], rel=1e-5)


@pytest.mark.parametrize("size", [5, 700, 20_011])
def test_the_draw_inverts_the_running_sum_by_ascending_id(size: int) -> None:
    rng = np.random.default_rng(size)
    row = (rng.normal(0, 2, size)).astype(np.float32)
    sampling = Sampling(seed=99, temperature=0.9, top_p=0.97)
    sums = np.cumsum(reference(row, sampling)[0])
    for index in range(200):
        u = uniform(99, index)
        if np.abs(sums - u).min() > 1e-6:
            assert int(np.argmax(sums > u)) == drawn(sampling, row, index)


def test_draws_follow_the_probabilities() -> None:
    """Chi-square, 7 degrees of freedom: 24.3 is exceeded once in a thousand streams."""
    row = row_of(1.0, 0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 0.25)
    sampling = Sampling(seed=20, temperature=1.3)
    draws = 20_000
    counts = np.bincount([drawn(sampling, row, i) for i in range(draws)], minlength=8)
    expected = draws * reference(row, sampling)[0]
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


@settings(max_examples=200, deadline=None)
@given(small_rows, samplings, st.integers(0, 10_000))
def test_a_token_without_probability_is_never_drawn(
    logits: list[float], sampling: Sampling, index: int
) -> None:
    row = row_of(*logits)
    assert distribution(row, sampling)[drawn(sampling, row, index)] > 0


def test_rounding_at_the_end_of_the_row_draws_the_last_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replica.sampling.uniform", lambda _seed, _index: 1.0)
    row = np.full(3 * BLOCK_TOKENS, -np.inf, np.float32)
    row[:700] = 0
    assert 699 == drawn(asked(), row)
    monkeypatch.setattr("replica.sampling.uniform", lambda _seed, _index: 0.0)
    row[:300] = -np.inf
    assert 300 == drawn(asked(), row)


def test_the_last_token_of_a_block_is_drawn() -> None:
    row = np.full(3 * BLOCK_TOKENS, -20.0, np.float32)
    row[BLOCK_TOKENS - 1] = 0
    assert candidates(row.copy(), 0.0, asked())[0] is None
    assert BLOCK_TOKENS - 1 == drawn(asked(), row)


# Truncation


def test_top_p_keeps_the_token_that_crosses() -> None:
    quarters = row_of(0, 0, 0, 0)
    assert [0, 1, 2] == survivors(quarters, top_p=0.51)
    assert [0, 1] == survivors(quarters, top_p=0.5)


def test_top_p_counts_the_mass_of_tokens_too_light_to_be_kept() -> None:
    """The first two of them hold 0.955 of all; alone, the first would hold more than 0.95."""
    row = np.full(8192, math.log(0.045 / 8190), np.float32)
    row[[4000, 4001]] = np.log([0.93, 0.025])
    assert [4000, 4001] == survivors(row, top_p=0.95)


def test_top_p_of_zero_keeps_the_likeliest_alone() -> None:
    assert [1] == survivors(row_of(0, 2, 2, 1), top_p=0.0)


def test_top_p_counts_the_mass_after_top_k_and_min_p() -> None:
    """Of the two kept tokens the first has 0.62, of all three only 0.51."""
    row = row_of(1.0, 0.5, 0.3)
    assert [0] == survivors(row, top_k=2, top_p=0.6)
    assert [0, 1] == survivors(row, top_p=0.6)
    assert [0] == survivors(row, min_p=0.55, top_p=0.6)


def test_top_p_and_min_p_act_after_temperature() -> None:
    row = row_of(2.0, 1.0, 0.0)
    assert [0, 1] == survivors(row, top_p=0.8)
    assert [0] == survivors(row, top_p=0.8, temperature=0.5)
    assert [0, 1] == survivors(row, min_p=0.3)
    assert [0] == survivors(row, min_p=0.3, temperature=0.5)


def test_min_p_is_relative_to_the_likeliest_and_includes_its_border() -> None:
    row = row_of(0.0, math.log(0.5), math.log(0.25))
    assert [0, 1] == survivors(row, min_p=0.499)
    assert [0, 3] == survivors(row_of(1, 0, 0, 1), min_p=1.0)


@pytest.mark.parametrize("temperature", [0.02, 0.7])
@pytest.mark.parametrize("span", [0, 9])
def test_the_border_of_min_p_is_met_exactly_where_tokens_are_gathered(
    temperature: float, span: float
) -> None:
    """A shortcut that rounds must not decide what the definition decides."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        row = np.full(64, -50.0, np.float32)
        lower = rng.uniform(0, span)
        row[[7, 20]] = lower + temperature * rng.uniform(0, 20), lower
        border = float(np.exp(np.float64(row[20] - np.float64(row[7])) / temperature))
        assert [7, 20] == survivors(row, temperature=temperature, min_p=border)
        assert [7] == survivors(row, temperature=temperature, min_p=border * (1 + 1e-12))


@pytest.mark.parametrize("size", [6, 6000])
def test_of_equal_tokens_the_lower_ids_are_kept(size: int) -> None:
    row = np.zeros(size, np.float32)
    row[2] = 1
    assert [0, 1, 2] == survivors(row, top_k=3)
    row[2] = 0
    assert list(range(size // 2)) == survivors(row, top_p=0.5)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert [0, 1, 2] == survivors(row_of(1, 2, 3), top_k=500)
    assert [0, 1, 2] == survivors(row_of(1, 2, 3), top_k=3)
    assert [0, 1, 2] == survivors(row_of(1, 2, 3), top_k=-1)


def test_few_survivors_are_gathered_and_many_are_not() -> None:
    """Otherwise the tests above would try one of the two ways alone."""
    row = steep(20_011, 1)
    gathered, weights = candidates(row.copy(), float(row.max()), Sampling(seed=0, top_k=40))
    assert gathered is not None
    assert 40 <= weights.size < row.size * FEW
    row = flat(20_011, 1)
    assert candidates(row, float(row.max()), Sampling(seed=0, top_p=0.95))[0] is None
    row = steep(20_011, 1)
    gathered, weights = candidates(row, float(row.max()), Sampling(seed=0, top_p=0.95))
    assert gathered is not None
    assert weights.size < row.size * FEW
