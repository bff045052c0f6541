"""The fields of a request that say how tokens are drawn and where the text ends.

Turns them into what the wire carries. Checks what depends on the vocabulary or on a limit.
"""

import secrets
from typing import Any

from gateway.openai.edge import EdgeLimits, Vocabulary
from gateway.openai.errors import InvalidRequestError, glimpse
from gateway.openai.schema import GenerationFields
from replica.wire import Sampling

_SEEDS = 2**64
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of one request's choices: far from any that a person would pick."""
_ANY_SEED = -1
"""Means "draw one" to llama.cpp's and vLLM's clients."""
_BIAS_MAX = 100


def samplings(
    request: GenerationFields, vocab: Vocabulary, limits: EdgeLimits, logprobs: int | None
) -> list[Sampling]:
    """Return how to draw each of the `n` choices. The first has the seed that was asked for."""
    if request.n > limits.choices_max:
        message = f"'n' is {request.n}: at most {limits.choices_max} choices can be asked for."
        raise InvalidRequestError(message, "n")
    seed = request.seed
    if seed is None or seed == _ANY_SEED:
        seed = secrets.randbits(64)
    bias = _logit_bias(request, vocab, limits)
    return [
        Sampling(
            seed=(seed + choice * _SEED_STEP) % _SEEDS,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repeat_penalty=request.repeat_penalty,
            logit_bias=bias,
            logprobs=logprobs,
        )
        for choice in range(request.n)
    ]


def stops(request: GenerationFields, limits: EdgeLimits) -> tuple[str, ...]:
    """Return the stop strings."""
    found = request.stop
    if found is None:
        return ()
    if isinstance(found, str):
        found = [found]
    if len(found) > limits.stops_max:
        message = f"'stop' holds {len(found)} strings: at most {limits.stops_max} can be given."
        raise InvalidRequestError(message, "stop")
    for stop in found:
        if not 0 < len(stop) <= limits.stop_chars_max:
            message = (
                f"'stop' holds a string of {len(stop)} characters: "
                f"it must have 1 to {limits.stop_chars_max}."
            )
            raise InvalidRequestError(message, "stop")
    return tuple(found)


def _logit_bias(
    request: GenerationFields, vocab: Vocabulary, limits: EdgeLimits
) -> dict[int, float]:
    """Read OpenAI's object, or llama-server's array of pairs; false bans a token."""
    given = request.logit_bias
    if given is None:
        return {}
    if len(given) > limits.logit_bias_max:
        message = f"'logit_bias' has {len(given)} entries: at most {limits.logit_bias_max}."
        raise InvalidRequestError(message, "logit_bias")
    pairs: list[Any] = list(given.items()) if isinstance(given, dict) else given
    bias: dict[int, float] = {}
    for pair in pairs:
        if len(pair) != 2:  # noqa: PLR2004 - a pair
            message = f"'logit_bias' holds {glimpse(pair)}: send pairs of a token and its bias."
            raise InvalidRequestError(message, "logit_bias")
        amount = _bias_amount(pair[1])
        bias |= dict.fromkeys(_biased_tokens(pair[0], vocab), amount)
    return bias


def _bias_amount(value: object) -> float:
    if value is False:
        return -float("inf")
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _BIAS_MAX:
        message = (
            f"'logit_bias' holds {glimpse(value)}: a bias is a number from -{_BIAS_MAX} to "
            f"{_BIAS_MAX}, or false to ban the token."
        )
        raise InvalidRequestError(message, "logit_bias")
    return float(value)


def _biased_tokens(key: object, vocab: Vocabulary) -> list[int]:
    """A token's number, also as a string; any other string means all tokens of that text."""
    if isinstance(key, str) and not key.isdecimal():
        return vocab.tokenize(key, add_special=False, parse_special=False)
    token_id = int(key) if isinstance(key, str) else key
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        token_id = -1
    if not 0 <= token_id < vocab.n_tokens:
        message = (
            f"'logit_bias' names the token {glimpse(key)}: "
            f"this model's tokens are 0 to {vocab.n_tokens - 1}."
        )
        raise InvalidRequestError(message, "logit_bias")
    return [token_id]
