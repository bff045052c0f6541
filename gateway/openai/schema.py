"""The requests clients may send: which fields, of which type, in which range.

Unknown fields are ignored and null counts as absent, both as OpenAI does it. What depends on more
than one field, on the model or on the configuration is checked where it is used.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.openai.errors import InvalidRequestError, glimpse
from replica.wire import TOP_LOGPROBS_MAX

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: entry for key, entry in value.items() if entry is not None}
    return value


def _false_is_absent(value: object) -> object:
    """Some routers add `logprobs: false` to every request."""
    return None if value is False else value


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        return _drop_nulls(value)


class StreamOptions(_Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(_Fields):
    type: str


class GenerationFields(_Fields):
    """What both kinds of completion have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Count = 1
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] = Field(
        1.0, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    logit_bias: dict[str, float | bool] | list[list[Any]] | None = None
    response_format: ResponseFormat | None = None


class TextPart(_Fields):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type != "text":
            kind = "only_text"
            raise PydanticCustomError(kind, "this model reads text only; send parts of type 'text'")
        if self.text is None:
            kind = "missing"
            raise PydanticCustomError(kind, "a part of type 'text' needs a 'text'")
        return self


class CalledFunction(_Fields):
    name: str
    arguments: str | dict[str, Any] = ""


class AssistantCall(_Fields):
    id: str = ""
    type: str = "function"
    function: CalledFunction


class ChatMessage(_Fields):
    """One message. Fields we do not know are kept, because templates may."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[AssistantCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            kind = "missing"
            raise PydanticCustomError(kind, "a message needs a 'content'")
        return self


class FunctionTool(_Fields):
    name: Annotated[str, Field(min_length=1)]


class Tool(_Fields):
    type: Literal["function"]
    function: FunctionTool


class ChatRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(GenerationFields):
    prompt: Any = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None, BeforeValidator(_false_is_absent)
    ] = None
    echo: bool = False
    best_of: Count | None = None
    suffix: str | None = None


Request = TypeVar("Request", bound=GenerationFields)


def read(kind: type[Request], body: object) -> Request:
    """Check a decoded body; what is wrong with it is an `InvalidRequestError`."""
    if not isinstance(body, Mapping):
        message = f"The body is {glimpse(body)}; send a JSON object."
        raise InvalidRequestError(message)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), body) from None


def _explained(errors: list[ErrorDetails], body: Mapping[str, object]) -> InvalidRequestError:
    """Say what is wrong with the first field that is wrong, and deepest where in it."""
    located = [(*_located(error["loc"], body), error) for error in errors]
    field = located[0][2]["loc"][:1]
    depth = max(len(path) for path, _, error in located if error["loc"][:1] == field)
    path, value = next(
        (path, value)
        for path, value, error in located
        if error["loc"][:1] == field and len(path) == depth
    )
    reasons = [_reason(error) for other, _, error in located if other == path]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")
    if reasons == [_MISSING]:
        return InvalidRequestError(f"'{param}' is missing; it is required.", param)
    expected = ", or ".join(dict.fromkeys(reasons))
    return InvalidRequestError(f"'{param}' is {glimpse(value)}: {expected}.", param)


_MISSING = "Field required"


_REASONS = {
    "too_short": "it must not be empty",
    "list_type": "it must be a list",
    "dict_type": "it must be an object",
    "model_type": "it must be an object",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
}
"""Where pydantic's own words would tell of Python."""


def _reason(error: ErrorDetails) -> str:
    words = error["msg"].replace("Input should be a valid", "it must be a", 1)
    return _REASONS.get(error["type"], words.replace("Input should be", "it must be", 1))


def _located(loc: tuple[int | str, ...], body: object) -> tuple[tuple[int | str, ...], object]:
    """Return the part of `loc` that is in the body, or missing from it, and the value there.

    The rest are names of pydantic's branches of a union.
    """
    path: list[int | str] = []
    value = body
    for position, part in enumerate(loc):
        inside: dict[Any, Any] = (
            value
            if isinstance(value, dict)
            else dict(enumerate(value))
            if isinstance(value, list)
            else {}
        )
        if part in inside:
            path.append(part)
            value = inside[part]
        elif position == len(loc) - 1 and isinstance(value, dict) and isinstance(part, str):
            path.append(part)
            value = None
    return tuple(path), value
