"""A prompt's text to tokens, and how much may follow them.

Long texts are tokenized beside the event loop. Texts that cannot fit are refused before.
"""

import asyncio

from gateway.openai.edge import Edge
from gateway.openai.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from replica.vocab import UntokenizableError

_INLINE_CHARS_MAX = 8192
"""Up to here, about a millisecond, tokenizing costs less than a thread and disturbs nobody."""


async def tokenize(edge: Edge, text: str, param: str, *, add_special: bool) -> list[int]:
    """Return the tokens of a text of the client's; `param` is where it came from."""
    at_least = len(text.encode()) // edge.vocab.piece_bytes_max
    if at_least > edge.context_tokens:
        length = f"at least {at_least}"
        raise _too_long(length, edge.context_tokens, param)
    try:
        if len(text) <= _INLINE_CHARS_MAX:
            return edge.vocab.tokenize(text, add_special=add_special, parse_special=True)
        return await asyncio.to_thread(
            edge.vocab.tokenize, text, add_special=add_special, parse_special=True
        )
    except UntokenizableError as error:
        message = f"'{param}' {error}."
        raise InvalidRequestError(message, param) from None


def room(edge: Edge, prompt_tokens: int, asked: int | None, param: str) -> int:
    """Return how many tokens may follow a prompt: what was asked for, as far as it fits."""
    left = edge.context_tokens - prompt_tokens
    if left < 1:
        raise _too_long(str(prompt_tokens), edge.context_tokens, param)
    return left if asked is None else min(asked, left)


def check_model(edge: Edge, model: str | None) -> None:
    """Refuse any model but ours. A request that names none means ours."""
    if model is not None and model != edge.model_id:
        message = f"The model '{model[:200]}' does not exist; this server has '{edge.model_id}'."
        raise ModelNotFoundError(message, "model")


def _too_long(prompt_tokens: str, context_tokens: int, param: str) -> ContextLengthError:
    message = (
        f"The prompt has {prompt_tokens} tokens, but this model's context is "
        f"{context_tokens} tokens for prompt and completion together. Shorten '{param}'."
    )
    return ContextLengthError(message, param)
