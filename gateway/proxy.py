"""The data plane: one request, from tokens in to tokens out, whatever happens to its replica.

Knows queues, replicas and tokens; knows no text, no HTTP and no OpenAI.

    RefusedError                 the request was never started; nothing has been sent
    ├── QueueFullError           more wait than the operator allowed
    ├── QueueTimeoutError        it waited longer than the operator allowed
    └── NoReplicaError           nobody to serve it, and nobody expected soon
    GenerationFailedError        it had started and cannot be finished
"""

from dataclasses import dataclass

from replica.wire import Sampling, TokenLogprobs


class RefusedError(Exception):
    """The request was never started. `retry_after_s` is when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(RefusedError):
    pass


class QueueTimeoutError(RefusedError):
    pass


class NoReplicaError(RefusedError):
    pass


class GenerationFailedError(Exception):
    """The request had started and cannot be finished; the message may be shown to the client."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    tokens_max: int
    sampling: Sampling
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Always the first thing heard of a job, once, before its first token."""

    replica_id: str
    mode: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens, in order, at least one. Never repeated, also when the replica changes."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class Done:
    """Always the last thing heard of a job that did not raise."""

    reason: str
    """`stop` or `length`."""
    cached_tokens: int


JobEvent = Placed | Tokens | Done
