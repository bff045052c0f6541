"""Draw one request's next token from one row of logits, exactly and in numpy alone.

It knows tokens and numbers, no model and no other request: what is drawn depends on the row, the
request's `Sampling`, the tokens it has seen and the index of the draw, never on batch company.

**Order**, which is vLLM's (V1 `Sampler`; llama.cpp differs in scaling by temperature last):

1. `logit_bias` is added; with `ignore_eos` the end tokens become -inf.
2. Penalties: repeat (prompt and completion), then frequency and presence (completion alone).
3. Greedy, the lowest id among equals, if `temperature` < `GREEDY_BELOW` or `top_k` is 1.
4. Weights exp((logit - largest logit) / temperature), so that the likeliest token weighs 1.
5. `min_p` keeps weights >= min_p; `top_k` the k largest; `top_p` the shortest run of the largest
   whose sum reaches top_p times the sum of what 5 has kept so far, the token that crosses
   included. Of equal weights the lower id counts as larger.
6. The token is the first, by ascending id, at which the running sum of the kept weights exceeds
   u times their total, where u = `uniform(seed, index)`.

Steps 3 to 6 and `uniform` are a contract between replicas: a request that continues elsewhere
must draw there what it would have drawn here. Change them only together with `WIRE_VERSION`.

**What is left out.** Where few tokens can matter, only those are weighed, in float64: there,
tokens lighter than `NEGLIGIBLE_MASS` / n are never drawn, which together takes less than
`NEGLIGIBLE_MASS` from the distribution; other filters drop only what step 5 would drop. Otherwise
the whole row is weighed in float32, each weight right to a few 1e-7 of itself (times its exponent
where that exceeds 1), so that two tokens nearer to each other than that may change places at a
cut. A row is sorted whole only for a top_p on flat logits or a top_k beyond n / `GROUP_TOKENS`.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replica.wire import Sampling, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy, as in vLLM: the division would overflow."""

NEGLIGIBLE_MASS = 1e-9
"""The most probability that a shortcut may take from all the tokens it ignores together."""

FEW = 1 / 8
"""Up to this share of the vocabulary, gathering tokens is cheaper than weighing the row."""

BLOCK_TOKENS = 512
"""Sums are made per block and searched in two steps: running sums of a whole row are slow."""

GROUP_TOKENS = 32
"""The k-th largest maximum of groups of this size bounds the k-th largest logit from below."""

SEEN_TOKENS_MIN = 64
"""Room for so many more distinct tokens, at least, is made at a time."""

Weights = NDArray[np.floating]
Ids = NDArray[np.intp]


class SamplingError(ValueError):
    """No token can be drawn from this row; the text says why and may be shown to the client."""


class Drawn(NamedTuple):
    """One token, and its logprobs where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides the draw at `index` of the completion.

    BLAKE2b with an 8-byte digest, no key and the personalization `numaserve.draw.1`, of the seed
    and the index as little-endian unsigned 64-bit integers; the digest, read as a little-endian
    integer, loses its 11 low bits and is divided by 2**53.
    """
    message = struct.pack("<QQ", seed, index)
    digest = hashlib.blake2b(message, digest_size=8, person=b"numaserve.draw.1").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """One request's drawing state. One thread at a time; different requests do not meet."""

    def __init__(
        self,
        sampling: Sampling,
        end_token_ids: Sequence[int],
        *,
        ignore_eos: bool,
        prompt: Sequence[int],
        completion: Sequence[int],
    ) -> None:
        assert sampling.temperature >= 0
        assert sampling.repeat_penalty > 0
        assert 0 <= sampling.min_p <= 1
        self._sampling = sampling
        self._greedy = sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
        self._biased = np.fromiter(sampling.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        self._banned = np.array(end_token_ids if ignore_eos else (), np.intp)
        self._penalties = None
        if _Penalties.wanted(sampling):
            self._penalties = _Penalties(sampling, prompt, completion)

    def draw(self, logits: NDArray[np.float32], index: int) -> Drawn:
        """Choose the token at `index` of the completion, without recording it.

        Uses up the row, unless logprobs are asked for: it may no longer hold logits afterwards.
        Raises `SamplingError` rather than draw from a row that is no distribution.
        """
        assert logits.ndim == 1
        assert index >= 0
        count = self._sampling.logprobs
        # A masked logit may be as low as float32 goes; what lies beyond is -inf, as it should.
        with np.errstate(over="ignore"):
            if count is None:
                return Drawn(self._choose(logits, index), None)
            # The client is told what the model said, so its logits must survive the choice.
            raw = _RawLogprobs(logits)
            token_id = self._choose(logits.copy(), index)
            return Drawn(token_id, TokenLogprobs(raw.of(token_id), raw.top(count)))

    def accept(self, token_id: int) -> None:
        """Record the token that follows; later penalties count it."""
        if self._penalties is not None:
            self._penalties.record(token_id)

    def _choose(self, row: NDArray[np.float32], index: int) -> int:
        self._edit(row)
        likeliest = _likeliest(row)
        if self._greedy:
            return likeliest
        ids, weights = candidates(row, float(row[likeliest]), self._sampling)
        place = _pick(weights, uniform(self._sampling.seed, index))
        return place if ids is None else int(ids[place])

    def _edit(self, row: NDArray[np.float32]) -> None:
        """Steps 1 and 2, in place."""
        if self._biased.size:
            if self._biased.min() < 0 or self._biased.max() >= row.size:
                msg = f"logit_bias names a token outside the vocabulary of {row.size} tokens"
                raise SamplingError(msg)
            row[self._biased] += self._bias
        if self._banned.size:
            row[self._banned] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(row)


class _Penalties:
    """The tokens seen so far, once each, in arrays that grow by doubling."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], completion: Sequence[int]
    ) -> None:
        self._repeat = sampling.repeat_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        counts = Counter(completion)
        if self._repeat != 1:
            counts.update(dict.fromkeys(prompt, 0))
        assert min(counts, default=0) >= 0
        self._slots = {token_id: slot for slot, token_id in enumerate(counts)}
        self._ids = np.fromiter(counts.keys(), np.intp)
        self._counts = np.fromiter(counts.values(), np.float32)

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        added = sampling.presence_penalty, sampling.frequency_penalty
        return sampling.repeat_penalty != 1 or any(added)

    def record(self, token_id: int) -> None:
        assert token_id >= 0
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.size:
            room = max(slot, SEEN_TOKENS_MIN)
            self._ids = np.pad(self._ids, (0, room))
            self._counts = np.pad(self._counts, (0, room))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def apply(self, row: NDArray[np.float32]) -> None:
        seen = len(self._slots)
        ids, counts = self._ids[:seen], self._counts[:seen]
        logits = row[ids]
        if self._repeat != 1:
            logits = np.where(logits > 0, logits / self._repeat, logits * self._repeat)
        logits -= self._frequency * counts
        logits -= self._presence * (counts > 0)
        row[ids] = logits


class _RawLogprobs:
    """Natural-log probabilities of the row as the model gave it."""

    def __init__(self, row: NDArray[np.float32]) -> None:
        self._row = row
        largest = row[_likeliest(row)]
        weights = row - largest
        np.exp(weights, out=weights)
        self._log_total = float(largest) + math.log(_running(weights)[-1])

    def of(self, token_id: int) -> float:
        return float(self._row[token_id]) - self._log_total

    def top(self, count: int) -> list[tuple[int, float]]:
        """Likeliest first, the lower id of equals first; impossible tokens are left out."""
        if count == 0:
            return []
        ids = np.flatnonzero(self._row >= _top_k_floor(self._row, count))
        logits = self._row[ids]
        order = np.argsort(-logits, kind="stable")[:count]
        return [(int(ids[i]), self.of(ids[i])) for i in order if logits[i] > -np.inf]


def candidates(
    row: NDArray[np.float32], largest: float, sampling: Sampling
) -> tuple[Ids | None, Weights]:
    """Steps 4 and 5: token ids, ascending, and their weights; ids None: position is id.

    Truncated tokens are missing or weigh 0. Overwrites the row, whose largest value is `largest`.
    """
    assert sampling.temperature >= GREEDY_BELOW
    ids: Ids | None = None
    weights: Weights = row
    possible = row >= _floor(row, largest, sampling)
    if np.count_nonzero(possible) <= row.size * FEW:
        ids = np.flatnonzero(possible)
        weights = row[ids].astype(np.float64)
    np.subtract(weights, largest, out=weights)
    if sampling.temperature != 1:
        np.divide(weights, sampling.temperature, out=weights)
    np.exp(weights, out=weights)
    if sampling.min_p > 0:
        np.multiply(weights, weights >= sampling.min_p, out=weights)
    if 0 < sampling.top_k < weights.size:
        _keep_largest(weights, np.sort(weights)[::-1], sampling.top_k)
    if sampling.top_p < 1:
        return _nucleus(ids, weights, sampling.top_p)
    return ids, weights


def _likeliest(row: NDArray[np.float32]) -> int:
    """The lowest id of the largest logit, which must be a number. argmax returns NaN first."""
    token_id = int(row.argmax())
    largest = float(row[token_id])
    if not math.isfinite(largest):
        why = "every token is ruled out" if largest == -math.inf else f"one of them is {largest}"
        msg = f"no token can be drawn from these logits: {why}"
        raise SamplingError(msg)
    return token_id


def _floor(row: NDArray[np.float32], largest: float, sampling: Sampling) -> np.float32:
    """A logit below which no token matters, low enough to decide no border case of min_p."""
    share = max(NEGLIGIBLE_MASS / row.size, sampling.min_p * (1 - 1e-6))
    floor = np.float32(largest + sampling.temperature * math.log(share))
    return max(floor, _top_k_floor(row, sampling.top_k))


def _top_k_floor(row: NDArray[np.float32], k: int) -> np.float32:
    """A logit that at least k tokens reach; -inf where that is not cheap to find.

    Each of k groups has one that reaches the k-th largest of the groups' maxima. Tokens beyond
    the last whole group can only raise the true k-th largest.
    """
    groups = row.size // GROUP_TOKENS
    if not 0 < k <= groups:
        return np.float32(-np.inf)
    grouped = row[: groups * GROUP_TOKENS].reshape(GROUP_TOKENS, groups)
    maxima = np.maximum.reduce(grouped, axis=0)
    maxima.partition(groups - k)
    floor: np.float32 = maxima[groups - k]
    return floor


def _nucleus(ids: Ids | None, weights: Weights, top_p: float) -> tuple[Ids | None, Weights]:
    """Keep the shortest run of the largest weights that sums to `top_p` of all."""
    total = float(_running(weights)[-1])
    # All that weigh less together weigh less than 1 - top_p of the total.
    heavy = weights >= (1 - top_p) * total / weights.size
    if np.count_nonzero(heavy) <= weights.size * FEW:
        places = np.flatnonzero(heavy)
        ids = places if ids is None else ids[places]
        weights = weights[places]
    ordered = np.sort(weights)[::-1]
    last = _find(ordered, _running(ordered), top_p * total, "left")
    _keep_largest(weights, ordered, last + 1)
    return ids, weights


def _keep_largest(weights: Weights, ordered: Weights, count: int) -> None:
    """Zero all but the `count` largest, in place; of equal ones the earlier is kept."""
    smallest = ordered[count - 1]
    kept = weights >= smallest
    excess = int(np.count_nonzero(kept)) - count
    assert excess >= 0
    if excess:
        kept[np.flatnonzero(weights == smallest)[-excess:]] = False
    np.multiply(weights, kept, out=weights)


def _pick(weights: Weights, u: float) -> int:
    """Step 6: the first place at which the running sum exceeds `u` of the total."""
    running = _running(weights)
    place = _find(weights, running, u * float(running[-1]), "right")
    assert weights[place] > 0
    return place


def _running(weights: Weights) -> NDArray[np.float64]:
    """The running sum of the weights at the end of each block."""
    starts = np.arange(0, weights.size, BLOCK_TOKENS)
    return np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)


def _find(
    weights: Weights, running: NDArray[np.float64], target: float, side: Literal["left", "right"]
) -> int:
    """The first place whose running sum reaches ("left") or exceeds ("right") the target.

    Rounding may put the target past the last sum; then it is the last place that added to it.
    """
    block = _first(running, target, side)
    start = block * BLOCK_TOKENS
    before = float(running[block - 1]) if block else 0.0
    within = np.cumsum(weights[start : start + BLOCK_TOKENS], dtype=np.float64)
    return start + _first(within, target - before, side)


def _first(sums: NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    last = sums.searchsorted(sums[-1], "left")
    return int(min(sums.searchsorted(target, side), last))
