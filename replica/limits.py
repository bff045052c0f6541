"""What a replica can serve at all, and which requests no replica like it could."""

import math
from dataclasses import dataclass

from replica.wire import TOP_LOGPROBS_MAX, Generate, Sampling

LOGIT_MAX = 1e30
"""No sensible bias or penalty exceeds it, and float32 still has room to add and multiply."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the configuration allow."""

    context_tokens: int
    """Prompt and completion of one sequence together."""
    vocab_tokens: int
    batch_tokens_max: int
    """The longest chunk of a prompt, when nobody else is decoding."""
    shared_chunk_tokens_max: int
    """A chunk of a prompt while streams are decoding, until the pace of both is known."""
    waiting_max: int
    """Requests beyond the streams; the gateway keeps the real queue."""
    gap_max_s: float | None = None
    """Between two tokens of a stream while prompts are read; None: in proportion to a step."""
    guess: bool = True
    """Whether tokens may be guessed ahead, where that pays."""


def objection(request: Generate, limits: Limits) -> str | None:
    """Return why the request cannot be served; these are faults of whoever sent it."""
    tokens = len(request.token_ids)
    if not 0 < request.prompt_tokens <= tokens:
        return f"prompt_tokens is {request.prompt_tokens} of {tokens} tokens"
    if tokens >= limits.context_tokens:
        return f"{tokens} tokens leave no room in a context of {limits.context_tokens}"
    if tokens - request.prompt_tokens >= request.tokens_max:
        return f"tokens_max is {request.tokens_max}, and no token is left to produce"
    if min(request.token_ids) < 0 or max(request.token_ids) >= limits.vocab_tokens:
        return f"a token id lies outside the vocabulary of {limits.vocab_tokens}"
    return _sampling_objection(request.sampling, limits.vocab_tokens)


def _sampling_objection(sampling: Sampling, vocab_tokens: int) -> str | None:
    """Return which field has a senseless value; a sampler asserts that it is given none."""
    allowed = {
        "seed": 0 <= sampling.seed < 1 << 64,
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_p": 0 <= sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_p": 0 <= sampling.min_p <= 1,
        "presence_penalty": abs(sampling.presence_penalty) <= LOGIT_MAX,
        "frequency_penalty": abs(sampling.frequency_penalty) <= LOGIT_MAX,
        "repeat_penalty": 0 < sampling.repeat_penalty < math.inf,
        "logprobs": 0 <= (sampling.logprobs or 0) <= TOP_LOGPROBS_MAX,
    }
    for name, fine in allowed.items():
        if not fine:
            return f"{name} cannot be {getattr(sampling, name)}"
    for token_id, bias in sampling.logit_bias.items():
        sensible = abs(bias) <= LOGIT_MAX or bias == -math.inf  # -inf bans the token
        if not (0 <= token_id < vocab_tokens and sensible):
            return f"logit_bias cannot be {bias} for token {token_id} of {vocab_tokens}"
    return None
