"""What the OpenAI surface is built from, and whom it tells what happened.

Only declarations: the one object that `gateway.openai` is given, and the protocols of its parts.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from gateway.openai.template import ChatTemplate
from gateway.proxy import Job, JobEvent

BODY_BYTES_MAX = 8 * 2**20
CHOICES_MAX = 8
PROMPTS_MAX = 32
STOPS_MAX = 16
STOP_CHARS_MAX = 256
LOGIT_BIAS_MAX = 1024
REQUEST_TIMEOUT_S = 3600.0
KEEPALIVE_S = 15.0


class Generator(Protocol):
    """The data plane. Closing what `generate` returned gives back all the job holds."""

    def generate(self, job: Job) -> AsyncGenerator[JobEvent]: ...


class Vocabulary(Protocol):
    """Text to tokens and tokens to bytes; see `replica.vocab.Vocab`."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def piece_bytes_max(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def leading_space(self) -> bool: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def piece(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """How one request went. There is exactly one for each, however it ended."""

    request_id: str
    """The one in `x-request-id`: the client's own, if it sent one."""
    route: str
    replica_id: str | None
    """Of the first of its jobs that was placed."""
    mode: str | None
    code: int
    """HTTP status; 499 when the client left before it was told one."""
    outcome: str
    """`ok`, `client_gone`, or the `code` or `type` of the error the client was given."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    """From the arrival of the request to its first token; None when there was none."""
    duration_s: float
    finish_reasons: tuple[str, ...]


class Observer(Protocol):
    """Hears what metrics and the access log need. Must not block and must not raise."""

    def on_first_token(self, seconds: float) -> None:
        """Say how long the client of a request waited for its first token."""

    def on_tokens(self, gap_s: float, count: int) -> None:
        """`count` tokens of one completion came `gap_s` after the ones before them."""

    def on_request(self, record: RequestRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Everything a client can make large, and how large it may become."""

    body_bytes_max: int = BODY_BYTES_MAX
    choices_max: int = CHOICES_MAX
    """`n`."""
    prompts_max: int = PROMPTS_MAX
    """Prompts in one request to /v1/completions."""
    stops_max: int = STOPS_MAX
    stop_chars_max: int = STOP_CHARS_MAX
    logit_bias_max: int = LOGIT_BIAS_MAX
    request_timeout_s: float = REQUEST_TIMEOUT_S
    """From the end of the body to the last byte of the answer."""
    keepalive_s: float = KEEPALIVE_S
    """The longest silence in a stream before a comment is sent."""


@dataclass(frozen=True, slots=True)
class Edge:
    """All that the OpenAI surface needs to know and to call."""

    generator: Generator
    vocab: Vocabulary
    template: ChatTemplate
    model_id: str
    fingerprint: str
    """Of the model; the `system_fingerprint` of every answer."""
    created: int
    """When the model was loaded or made, in Unix seconds."""
    context_tokens: int
    """Prompt and completion together."""
    observe: Observer
    limits: EdgeLimits = field(default_factory=EdgeLimits)
