"""A checked request: the jobs it needs, the completions that grow from them, how to write them.

`chat` and `completions` make plans; `exchange` carries them out.
"""

from dataclasses import dataclass, field
from typing import Protocol

from gateway.openai.choice import Choice, Delta, ShownToken
from gateway.openai.errors import InvalidRequestError
from gateway.openai.schema import GenerationFields
from gateway.openai.tools import ToolCall
from gateway.proxy import Job


@dataclass(slots=True)
class Whole:
    """A completion that is not streamed: everything that became visible of it."""

    choice: Choice
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.calls += delta.calls
        self.tokens += delta.tokens


class Format(Protocol):
    """How a kind of completion is written down; each method gives entries of `choices`."""

    kind: str
    """The `object` of an answer."""
    chunk_kind: str
    """The `object` of a part of a stream."""

    def opening(self, index: int) -> list[bytes]:
        """Return what is sent before a completion's first delta."""

    def delta(self, index: int, delta: Delta) -> list[bytes]: ...

    def closing(self, index: int, finish_reason: str) -> bytes: ...

    def whole(self, whole: Whole) -> bytes: ...


@dataclass(slots=True)
class Plan:
    """What to do, and in which form the client wants to hear of it."""

    answer_id: str
    jobs: list[Job]
    choices: list[Choice]
    """One for each job."""
    prompt_tokens: list[int]
    """One for each prompt. Each prompt has equally many jobs, next to each other."""
    form: Format
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def __post_init__(self) -> None:
        assert len(self.jobs) == len(self.choices)
        assert len(self.jobs) % len(self.prompt_tokens) == 0


def stream_options(request: GenerationFields) -> tuple[bool, bool]:
    """Return whether usage is wanted at the end, and with every chunk."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        message = "'stream_options' is only allowed with 'stream': true; leave it out."
        raise InvalidRequestError(message, "stream_options")
    return options.include_usage or options.continuous_usage_stats, options.continuous_usage_stats


def check_format(request: GenerationFields) -> None:
    """Refuse what would need constrained sampling."""
    wanted = request.response_format
    if wanted is not None and wanted.type != "text":
        message = (
            f"'response_format' of type '{wanted.type[:50]}' is not supported yet; "
            'send {"type": "text"} or leave it out.'
        )
        raise InvalidRequestError(message, "response_format")
