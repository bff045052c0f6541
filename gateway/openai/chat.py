"""/v1/chat/completions: a conversation to a prompt, a completion to a message."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.openai import prompt, sampling
from gateway.openai.choice import Choice, Delta, ShownToken
from gateway.openai.edge import Edge, Vocabulary
from gateway.openai.errors import InvalidRequestError, glimpse
from gateway.openai.plan import Plan, Whole, check_format, stream_options
from gateway.openai.schema import ChatMessage, ChatRequest, read
from gateway.openai.template import TemplateRefusedError
from gateway.openai.tools import HermesParser, ToolCall
from gateway.proxy import Job

_encode = msgspec.json.Encoder().encode
_LOGPROB_MIN = -9999.0
"""OpenAI's stand-in for the logarithm of zero, which JSON cannot write."""


async def plan_chat(edge: Edge, body: object) -> Plan:
    """Check a request and lay out what it needs."""
    request = read(ChatRequest, body)
    prompt.check_model(edge, request.model)
    _check(request)
    check_format(request)
    include_usage, continuous_usage = stream_options(request)
    draws = sampling.samplings(request, edge.vocab, edge.limits, _wanted_logprobs(request))
    stops = sampling.stops(request, edge.limits)
    tools = _tools(request, body, edge)
    token_ids = await _prompt(edge, request, tools)
    asked = request.max_completion_tokens or request.max_tokens
    tokens_max = prompt.room(edge, len(token_ids), asked, "messages")
    answer_id = f"chatcmpl-{secrets.token_hex(12)}"
    return Plan(
        answer_id=answer_id,
        jobs=[
            Job(f"{answer_id}-{index}", token_ids, tokens_max, draw, request.ignore_eos)
            for index, draw in enumerate(draws)
        ],
        choices=[
            Choice(
                index,
                edge.vocab,
                stops=stops,
                skip_leading_space=edge.vocab.leading_space,
                parser=HermesParser(_new_call_id) if tools else None,
                one_call=not request.parallel_tool_calls,
            )
            for index in range(len(draws))
        ],
        prompt_tokens=[len(token_ids)],
        form=ChatFormat(edge.vocab, logprobs=request.logprobs),
        stream=request.stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _check(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        message = "'top_logprobs' needs 'logprobs': true."
        raise InvalidRequestError(message, "top_logprobs")
    if request.continue_final_message:
        message = "'continue_final_message' is not supported; end with a user's message."
        raise InvalidRequestError(message, "continue_final_message")


def _wanted_logprobs(request: ChatRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _tools(request: ChatRequest, body: object, edge: Edge) -> list[dict[str, Any]]:
    """Return the tools the model is told of, just as the client wrote them."""
    choice = request.tool_choice
    if isinstance(choice, dict) or choice not in {None, "none", "auto"}:
        message = (
            f"'tool_choice' is {glimpse(choice)}: forcing a call is not supported yet; "
            "send 'auto' or 'none'."
        )
        raise InvalidRequestError(message, "tool_choice")
    if not request.tools or choice == "none":
        return []
    if not edge.template.takes_tools:
        message = "'tools' cannot be used: this model's chat template has no place for them."
        raise InvalidRequestError(message, "tools")
    assert isinstance(body, dict)
    tools: list[dict[str, Any]] = body["tools"]
    return tools


async def _prompt(edge: Edge, request: ChatRequest, tools: list[dict[str, Any]]) -> list[int]:
    """Render and tokenize the conversation, with exactly one BOS if the model wants one."""
    messages = [_for_template(message) for message in request.messages]
    variables = {"add_generation_prompt": request.add_generation_prompt}
    try:
        text = edge.template.render(messages, tools, variables | request.chat_template_kwargs)
    except TemplateRefusedError as error:
        message = f"The model's chat template refuses this conversation: {error}"
        raise InvalidRequestError(message, "messages") from None
    token_ids = await prompt.tokenize(edge, text, "messages", add_special=False)
    bos_id = edge.vocab.bos_id
    if edge.vocab.add_bos and bos_id is not None and token_ids[:1] != [bos_id]:
        token_ids = [bos_id, *token_ids]
    if not token_ids:
        message = "'messages' render to an empty prompt."
        raise InvalidRequestError(message, "messages")
    return token_ids


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """Write a message as templates expect it: content a string, arguments an object."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"  # the only name for it that templates know
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text or "" for part in message.content)
    elif message.content is None:
        fields["content"] = ""
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def _arguments(given: str | dict[str, Any]) -> object:
    if isinstance(given, dict):
        return given
    try:
        value = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


class ChatFormat:
    """Writes messages and their deltas."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, vocab: Vocabulary, *, logprobs: bool) -> None:
        self._vocab = vocab
        self._logprobs = logprobs

    def opening(self, index: int) -> list[bytes]:
        return [_entry(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if not self._logprobs and not delta.calls:  # nearly always, so it is kept short
            text = _encode(delta.text)
            return [
                b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                % (index, text)
            ]
        entries = []
        if delta.text or delta.tokens:
            logprobs = self._written(delta.tokens) if self._logprobs else None
            entries.append(_entry(index, {"content": delta.text}, logprobs))
        entries += [
            _entry(index, {"tool_calls": [{"index": call.index, **_written_call(call)}]})
            for call in delta.calls
        ]
        return entries

    def closing(self, index: int, finish_reason: str) -> bytes:
        return _entry(index, {}, finish_reason=finish_reason)

    def whole(self, whole: Whole) -> bytes:
        content = "".join(whole.text)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if whole.calls:
            message["content"] = content or None
            message["tool_calls"] = [_written_call(call) for call in whole.calls]
        return _encode(
            {
                "index": whole.choice.index,
                "message": message,
                "logprobs": self._written(whole.tokens) if self._logprobs else None,
                "finish_reason": whole.choice.finish_reason,
            }
        )

    def _written(self, tokens: Sequence[ShownToken]) -> dict[str, object]:
        return {
            "content": [
                {
                    **self._written_token(token.token_id, token.logprobs.logprob),
                    "top_logprobs": [
                        self._written_token(token_id, logprob)
                        for token_id, logprob in token.logprobs.top
                    ],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _written_token(self, token_id: int, logprob: float) -> dict[str, object]:
        piece = self._vocab.piece(token_id)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOGPROB_MIN),
            "bytes": list(piece),
        }


def _entry(
    index: int, delta: object, logprobs: object = None, finish_reason: str | None = None
) -> bytes:
    return _encode(
        {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    )


def _written_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
