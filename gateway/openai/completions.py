"""/v1/completions: prompts as text or as tokens, continued as they are."""

import secrets
from collections.abc import Sequence
from itertools import product

import msgspec

from gateway.openai import prompt, sampling
from gateway.openai.choice import Choice, Delta, ShownToken
from gateway.openai.edge import Edge, Vocabulary
from gateway.openai.errors import InvalidRequestError, glimpse
from gateway.openai.plan import Plan, Whole, check_format, stream_options
from gateway.openai.schema import CompletionRequest, read
from gateway.proxy import Job

_encode = msgspec.json.Encoder().encode
_LOGPROB_MIN = -9999.0


async def plan_completion(edge: Edge, body: object) -> Plan:
    """Check a request and lay out what it needs."""
    request = read(CompletionRequest, body)
    prompt.check_model(edge, request.model)
    _check(request)
    check_format(request)
    include_usage, continuous_usage = stream_options(request)
    draws = sampling.samplings(request, edge.vocab, edge.limits, request.logprobs)
    stops = sampling.stops(request, edge.limits)
    prompts = await _prompts(edge, request.prompt)
    answer_id = f"cmpl-{secrets.token_hex(12)}"
    jobs = []
    for index, (token_ids, draw) in enumerate(product(prompts, draws)):
        tokens_max = prompt.room(edge, len(token_ids), request.max_tokens, "prompt")
        jobs.append(Job(f"{answer_id}-{index}", token_ids, tokens_max, draw, request.ignore_eos))
    return Plan(
        answer_id=answer_id,
        jobs=jobs,
        choices=[Choice(index, edge.vocab, stops=stops) for index in range(len(jobs))],
        prompt_tokens=[len(token_ids) for token_ids in prompts],
        form=CompletionFormat(edge.vocab, logprobs=request.logprobs is not None),
        stream=request.stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def _check(request: CompletionRequest) -> None:
    refused = {
        "echo": ("true", request.echo),
        "suffix": ("not empty", bool(request.suffix)),
        "best_of": ("not 'n'", request.best_of not in {None, request.n}),
    }
    for param, (what, present) in refused.items():
        if present:
            message = f"'{param}' is {what}: that is not supported; leave it out."
            raise InvalidRequestError(message, param)


async def _prompts(edge: Edge, given: object) -> list[list[int]]:
    """Read a string, a list of strings, tokens, or a list of lists of tokens."""
    if given is None:
        message = "'prompt' is missing; it is required."
        raise InvalidRequestError(message, "prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    entries: list[object] = given if isinstance(given, list) and several else [given]
    if len(entries) > edge.limits.prompts_max:
        message = f"'prompt' holds {len(entries)} prompts: at most {edge.limits.prompts_max}."
        raise InvalidRequestError(message, "prompt")
    return [
        await _prompt(edge, entry, f"prompt[{index}]" if several else "prompt")
        for index, entry in enumerate(entries)
    ]


async def _prompt(edge: Edge, given: object, param: str) -> list[int]:
    if isinstance(given, str):
        token_ids = await prompt.tokenize(edge, given, param, add_special=True)
        bos_id = edge.vocab.bos_id
        if not token_ids and bos_id is not None:
            token_ids = [bos_id]  # what a text begins with; OpenAI does the same
    elif isinstance(given, list) and all(type(entry) is int for entry in given):
        token_ids = given
    else:
        message = f"'{param}' is {glimpse(given)}: it must be a text, or a list of tokens."
        raise InvalidRequestError(message, param)
    if not token_ids:
        message = f"'{param}' is empty; send at least one token."
        raise InvalidRequestError(message, param)
    last = edge.vocab.n_tokens - 1
    if not 0 <= min(token_ids) <= max(token_ids) <= last:
        message = f"'{param}' holds a token out of range: this model's are 0 to {last}."
        raise InvalidRequestError(message, param)
    return token_ids


class CompletionFormat:
    """Writes completions and their parts, which look the same."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, vocab: Vocabulary, *, logprobs: bool) -> None:
        self._vocab = vocab
        self._logprobs = logprobs

    def opening(self, index: int) -> list[bytes]:  # noqa: ARG002 - there is none
        return []

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if not self._logprobs:
            text = _encode(delta.text)
            return [b'{"text":%b,"index":%d,"logprobs":null,"finish_reason":null}' % (text, index)]
        return [_entry(index, delta.text, self._written(delta.tokens), None)]

    def closing(self, index: int, finish_reason: str) -> bytes:
        return _entry(index, "", None, finish_reason)

    def whole(self, whole: Whole) -> bytes:
        logprobs = self._written(whole.tokens) if self._logprobs else None
        text = "".join(whole.text)
        return _entry(whole.choice.index, text, logprobs, whole.choice.finish_reason)

    def _written(self, tokens: Sequence[ShownToken]) -> dict[str, object]:
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprobs.logprob, _LOGPROB_MIN) for token in tokens],
            "top_logprobs": [
                {
                    self._text(token_id): max(logprob, _LOGPROB_MIN)
                    for token_id, logprob in token.logprobs.top
                }
                for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }

    def _text(self, token_id: int) -> str:
        return self._vocab.piece(token_id).decode("utf-8", "replace")


def _entry(index: int, text: str, logprobs: object, finish_reason: str | None) -> bytes:
    return _encode(
        {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}
    )
