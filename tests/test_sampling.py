"""One request's draws: greedy, the random stream, what is edited before and what is told after.

Which probabilities a draw obeys is the matter of `test_sampling_distribution`.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replica.sampling import GREEDY_BELOW, Sampler, SamplingError, uniform
from replica.wire import Sampling

Row = NDArray[np.float32]


def row_of(*logits: float) -> Row:
    return np.array(logits, np.float32)


def asked(**fields: Any) -> Sampling:  # noqa: ANN401 - the fields of Sampling
    return Sampling(**{"seed": 7, **fields})


def sampler(
    sampling: Sampling,
    completion: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    ends: Sequence[int] = (),
    ignore_eos: bool = False,
) -> Sampler:
    return Sampler(sampling, ends, ignore_eos=ignore_eos, prompt=prompt, completion=completion)


def drawn(drawer: Sampler, row: Row, index: int = 0) -> int:
    return drawer.draw(row.copy(), index).token_id


def greedy_after(
    row: Row,
    completion: Sequence[int],
    prompt: Sequence[int],
    **penalties: Any,  # noqa: ANN401 - fields of Sampling
) -> int:
    return drawn(sampler(asked(temperature=0.0, **penalties), completion, prompt=prompt), row)


def flat(size: int, seed: int) -> Row:
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)


# Greedy


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 9e-6}])
def test_greedy_takes_the_lowest_of_equal_ids(greedy: dict[str, float]) -> None:
    row = np.zeros(1000, np.float32)
    row[[900, 333, 500]] = 4
    assert 333 == drawn(sampler(asked(**greedy)), row)


def test_the_lowest_temperature_that_is_not_greedy_draws_among_equals_only() -> None:
    drawer = sampler(asked(temperature=GREEDY_BELOW))
    row = row_of(-3e38, 1, 5, 5, 4.999)
    assert {2, 3} == {drawn(drawer, row, index) for index in range(50)}


# The random stream


def test_the_stream_is_the_documented_one() -> None:
    message = (7).to_bytes(8, "little") + (3).to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"numaserve.draw.1").digest()
    assert (int.from_bytes(digest, "little") >> 11) / 2**53 == uniform(7, 3)


def test_the_stream_never_changes() -> None:
    """Replicas of two releases may serve the two halves of one completion."""
    expected = [0.6454577673771771, 0.03780036118798791, 0.14263500933627749, 0.15292950286861395]
    assert expected == [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 5)]


def test_the_stream_is_even_over_indices_and_over_seeds() -> None:
    """Chi-square, 15 degrees of freedom: 37.7 is exceeded once in a thousand streams."""
    for numbers in (
        [uniform(5, index) for index in range(16_000)],
        [uniform(seed, 0) for seed in range(16_000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 37.7


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    row = flat(3000, 4)
    expected = [drawn(sampler(asked()), row, index) for index in range(20)]
    backwards = sampler(asked())
    assert expected[::-1] == [drawn(backwards, row, index) for index in reversed(range(20))]
    assert len(set(expected)) > 15
    assert expected != [drawn(sampler(asked(seed=8)), row, index) for index in range(20)]


@given(
    prompt=st.lists(st.integers(0, 49), max_size=30),
    completion=st.lists(st.integers(0, 49), max_size=30),
    cut=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_a_resumed_request_draws_what_it_would_have_drawn(
    prompt: list[int], completion: list[int], cut: int
) -> None:
    fields = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repeat_penalty": 1.2,
        "top_p": 0.9,
    }
    resumed = sampler(asked(**fields), completion, prompt=prompt)
    grown = sampler(asked(**fields), completion[:cut], prompt=prompt)
    for token_id in completion[cut:]:
        grown.accept(token_id)
    for index in range(len(completion), len(completion) + 12):
        row = flat(50, index)
        token_id = drawn(resumed, row, index)
        assert token_id == drawn(grown, row, index)
        resumed.accept(token_id)
        grown.accept(token_id)


# Bias and penalties


def test_a_bias_is_added_to_its_token() -> None:
    row = row_of(3, 2, 1)
    assert 2 == drawn(sampler(asked(temperature=0.0, logit_bias={2: 2.5, 1: 0.5})), row)
    assert 0 == drawn(sampler(asked(temperature=0.0, logit_bias={2: 1.5})), row)


def test_a_bias_of_minus_infinity_bans() -> None:
    drawer = sampler(asked(logit_bias={0: -math.inf, 1: -math.inf}))
    assert {2} == {drawn(drawer, row_of(9, 9, 0), index) for index in range(30)}


def test_ignore_eos_bans_every_end_token_whatever_its_bias() -> None:
    drawer = sampler(asked(logit_bias={0: 100}), ends=[0, 2], ignore_eos=True)
    assert {1} == {drawn(drawer, row_of(9, 0, 9), index) for index in range(30)}
    assert 0 == drawn(sampler(asked(temperature=0.0), ends=[0, 2]), row_of(9, 0, 8))


def test_presence_is_subtracted_once_and_only_for_the_completion() -> None:
    row = row_of(2, 1, 0)
    assert 1 == greedy_after(row, [0, 2], [], presence_penalty=1.5)
    assert 0 == greedy_after(row, [0, 0, 0], [], presence_penalty=0.9)
    assert 0 == greedy_after(row, [], [0], presence_penalty=1.5)


def test_frequency_is_subtracted_per_occurrence_and_only_for_the_completion() -> None:
    row = row_of(2, 1, 0)
    assert 0 == greedy_after(row, [0], [0, 0], frequency_penalty=0.6)
    assert 1 == greedy_after(row, [0, 0], [], frequency_penalty=0.6)


def test_a_negative_penalty_encourages() -> None:
    assert 1 == greedy_after(row_of(2, 1), [1], [], presence_penalty=-1.5)
    assert 1 == greedy_after(row_of(2, 1), [1, 1], [], frequency_penalty=-0.6)


def test_repeat_divides_positive_and_multiplies_negative_logits_of_prompt_and_completion() -> None:
    assert 1 == greedy_after(row_of(2, 1.5), [], [0], repeat_penalty=1.5)
    assert 1 == greedy_after(row_of(2, 1.5), [0], [], repeat_penalty=1.5)
    assert 0 == greedy_after(row_of(2, 1.5), [0, 0], [0, 0], repeat_penalty=1.2)
    assert 1 == greedy_after(row_of(-1, -1.2), [0], [], repeat_penalty=1.5)
    assert 1 == greedy_after(row_of(1, 1.5), [], [1], repeat_penalty=1.4)


def test_repeat_comes_before_presence_and_bias_before_both() -> None:
    """(3 + 1) / 2 - 1 = 1; any other order leaves 1.5 or 2."""
    penalties = {"repeat_penalty": 2.0, "presence_penalty": 1.0}
    for rival, expected in ((0.9, 0), (1.1, 1)):
        drawer = sampler(asked(temperature=0.0, logit_bias={0: 1.0}, **penalties), [0])
        assert expected == drawn(drawer, row_of(3, rival))


def test_accepted_tokens_are_counted_however_many_there_are() -> None:
    drawer = sampler(asked(temperature=0.0, presence_penalty=1.0))
    row = np.arange(500, 0, -1, dtype=np.float32)
    row /= 1000
    for expected in range(400):
        assert expected == drawn(drawer, row)
        drawer.accept(expected)


def test_a_repeat_penalty_does_not_make_presence_count_the_prompt() -> None:
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 5.0, "frequency_penalty": 5.0}
    assert 0 == greedy_after(row_of(3, 1), [], [0], **penalties)
    assert 1 == greedy_after(row_of(3, 1), [0], [0], **penalties)


def test_penalties_act_before_truncation_and_draw() -> None:
    drawer = sampler(asked(top_k=2, presence_penalty=50.0), [0])
    assert {1, 2} == {drawn(drawer, row_of(9, 1, 1, 0), index) for index in range(30)}


# Logprobs


def test_logprobs_are_of_the_model_and_not_of_the_draw() -> None:
    row = row_of(1, 3, 2, 0)
    raw = row - math.log(np.exp(row).sum())
    drawer = sampler(
        asked(temperature=0.5, top_k=2, presence_penalty=9.0, logit_bias={1: -9}, logprobs=2),
        [1, 2],
    )
    token_id, logprobs = drawer.draw(row.copy(), 0)
    assert token_id in {0, 3}
    assert logprobs is not None
    assert pytest.approx(raw[token_id], abs=1e-6) == logprobs.logprob
    assert [1, 2] == [token for token, _ in logprobs.top]
    assert pytest.approx([raw[1], raw[2]], abs=1e-6) == [value for _, value in logprobs.top]


def test_all_logprobs_sum_to_one_and_fall() -> None:
    row = flat(3001, 3)
    logprobs = sampler(asked(logprobs=3001)).draw(row.copy(), 0).logprobs
    assert logprobs is not None
    values = [value for _, value in logprobs.top]
    assert pytest.approx(1, abs=1e-6) == sum(math.exp(value) for value in values)
    assert sorted(values, reverse=True) == values
    assert 3001 == len({token_id for token_id, _ in logprobs.top})


@pytest.mark.parametrize("size", [30, 6000])
def test_equally_likely_alternatives_come_by_ascending_id(size: int) -> None:
    row = np.zeros(size, np.float32)
    row[[3, 17, 25]] = 1
    logprobs = sampler(asked(temperature=0.0, logprobs=5)).draw(row, 0).logprobs
    assert logprobs is not None
    assert [3, 17, 25, 0, 1] == [token_id for token_id, _ in logprobs.top]
    assert logprobs.logprob == logprobs.top[0][1]


def test_logprobs_without_alternatives() -> None:
    logprobs = sampler(asked(logprobs=0, temperature=0.0)).draw(row_of(0, 0), 0).logprobs
    assert logprobs is not None
    assert pytest.approx(math.log(0.5)) == logprobs.logprob
    assert [] == logprobs.top
    assert sampler(asked()).draw(row_of(0, 0), 0).logprobs is None


def test_impossible_tokens_are_no_alternatives() -> None:
    """-inf is not JSON."""
    logprobs = sampler(asked(logprobs=3)).draw(row_of(-math.inf, 1, -math.inf), 0).logprobs
    assert logprobs is not None
    assert [(1, 0.0)] == logprobs.top


def test_asking_for_logprobs_changes_no_draw() -> None:
    row = flat(3000, 5)
    for index in range(20):
        expected = drawn(sampler(asked(repeat_penalty=1.3), [1, 2]), row, index)
        assert expected == drawn(sampler(asked(repeat_penalty=1.3, logprobs=4), [1, 2]), row, index)


# Errors


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 5}, {"logprobs": 1}])
@pytest.mark.parametrize(
    ("logits", "why"),
    [
        ([1.0, math.nan, 2.0] + 60 * [3.0], "nan"),
        ([-math.inf, -math.inf], "every token is ruled out"),
        ([0.0, math.inf], "inf"),
    ],
    ids=["nan", "all ruled out", "inf"],
)
def test_a_row_that_is_no_distribution_is_an_error(
    logits: list[float], why: str, sampling: dict[str, float]
) -> None:
    with pytest.raises(SamplingError, match=why):
        sampler(asked(**sampling)).draw(row_of(*logits), 0)


def test_banning_every_token_is_an_error() -> None:
    banned = sampler(asked(logit_bias={0: -math.inf}), ends=[1], ignore_eos=True)
    with pytest.raises(SamplingError, match="ruled out"):
        banned.draw(row_of(1, 2), 0)


@pytest.mark.parametrize("token_id", [-1, 3])
def test_a_bias_outside_the_vocabulary_is_an_error(token_id: int) -> None:
    with pytest.raises(SamplingError, match="vocabulary of 3 tokens"):
        sampler(asked(logit_bias={token_id: 1.0})).draw(row_of(1, 2, 3), 0)
