"""The data plane: one request, from tokens in to tokens out, whatever happens to its replica.

Knows queues, replicas and tokens; knows no text, no HTTP and no OpenAI.

    RefusedError                 the request was never started; nothing has been sent
    ├── QueueFullError           more wait than the operator allowed
    ├── QueueTimeoutError        it waited longer than the operator allowed
    └── NoReplicaError           nobody to serve it, and nobody expected soon
    GenerationFailedError        it had started and cannot be finished
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from gateway.dispatch import Dispatcher, Ticket
from gateway.link import ReplicaLostError
from gateway.routing import Decision
from replica.blocks import BLOCK_TOKENS, block_hashes
from replica.wire import Finished, FinishReason, Generate, Output, Sampling, TokenLogprobs

log = logging.getLogger(__name__)

LOSSES_MAX = 2
"""Replicas a request may lose before it is taken for the one that kills them."""
RETRY_AFTER_S = 5.0
"""Told to clients while nothing is known about how long requests take."""
SMOOTHING = 0.1


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


class _TurnedAwayError(Exception):
    """This replica takes nothing more until it connects anew; another one may."""


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
    cached_tokens: int | None = None
    """With the job's first tokens: as in `Done`, for who stops listening before that."""


@dataclass(frozen=True, slots=True)
class Done:
    """Always the last thing heard of a job that did not raise."""

    reason: str
    """`stop` or `length`."""
    cached_tokens: int


JobEvent = Placed | Tokens | Done


class ReplicaClient(Protocol):
    """A connected replica: `gateway.link.ReplicaLink`."""

    def generate(self, request: Generate) -> AsyncGenerator[Output | Finished]: ...


class Observer(Protocol):
    """Who counts decisions and waiting."""

    def placed(self, reason: str, queue_s: float) -> None: ...

    def generated(self, replica_id: str, count: int) -> None: ...


@dataclass(slots=True)
class _Course:
    """How far one job has got, over all the replicas that have worked on it."""

    job: Job
    completion: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    losses: int = 0
    announced: bool = False
    over: bool = False

    def request(self) -> Generate:
        job = self.job
        return Generate(
            request_id=job.request_id,
            token_ids=job.token_ids + self.completion,
            prompt_tokens=len(job.token_ids),
            tokens_max=job.tokens_max,
            sampling=job.sampling,
            ignore_eos=job.ignore_eos,
        )


class Proxy:
    """Carries jobs to replicas, and on to others when those are lost."""

    def __init__(  # noqa: PLR0913  # the data plane is where everything meets
        self,
        dispatcher: Dispatcher,
        clients: Mapping[str, ReplicaClient],
        observer: Observer,
        *,
        root: int,
        mode: Callable[[], str],
        hopeless: Callable[[], bool],
        queue_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._observer = observer
        self._root = root
        self._mode = mode
        self._hopeless = hopeless
        self._queue_timeout_s = queue_timeout_s
        self._placements: dict[str, asyncio.Future[Decision]] = {}
        self._service_s: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._jobs = 0
        self.draining = False
        self.recoveries = 0
        """Times a job went on elsewhere after its replica was lost."""

    async def idle(self) -> None:
        """Wait until no job waits or runs."""
        await self._idle.wait()

    async def generate(self, job: Job) -> AsyncGenerator[JobEvent]:
        """Yield what happens to a job: `Placed`, then `Tokens`, then `Done`.

        A job whose replica is lost goes on elsewhere from the tokens it has. Closing the generator
        cancels the job. Raises what the head of this file lists.
        """
        course = _Course(job)
        self._jobs += 1
        self._idle.clear()
        try:
            while not course.over:
                decision = await self._place(course)
                async with aclosing(self._attempt(course, decision)) as events:
                    async for event in events:
                        yield event
        finally:
            self._jobs -= 1
            if self._jobs == 0:
                self._idle.set()

    async def _attempt(self, course: _Course, decision: Decision) -> AsyncGenerator[JobEvent]:
        """Have one replica work on a job until it is done or the replica is lost."""
        job = course.job
        started = time.monotonic()
        try:
            if not course.announced:
                course.announced = True
                yield Placed(decision.replica_id, self._mode())
            client = self._clients[decision.replica_id]
            async with aclosing(client.generate(course.request())) as outputs:
                async for output in outputs:
                    event = _advance(course, output)
                    if isinstance(event, Tokens):
                        self._observer.generated(decision.replica_id, len(event.token_ids))
                    yield event
            self._learn(time.monotonic() - started)
        except _TurnedAwayError as error:
            # It would say the same to everybody, first of all to this job, for it is now idlest.
            log.warning("%s: %s takes nothing more: %s", job.request_id, decision.replica_id, error)
            self._dispatcher.close(decision.replica_id)
            self.recoveries += 1
        except ReplicaLostError as error:
            course.losses += 1
            log.warning("%s: %s after %d tokens", job.request_id, error, len(course.completion))
            if len(course.completion) == job.tokens_max:
                course.over = True  # all that is missing is the news of its end
                yield Done(FinishReason.LENGTH.value, course.cached_tokens or 0)
                return
            if course.losses >= LOSSES_MAX:
                message = f"{course.losses} replicas were lost while serving this request"
                raise GenerationFailedError(message) from None
            self.recoveries += 1
        finally:
            self._dispatcher.release(job.request_id)
            self.wake()

    def wake(self) -> None:
        """Match queue to replicas again. Called after every change to either."""
        for assignment in self._dispatcher.assign():
            placement = self._placements[assignment.request_id]
            # A request cancelled in this very tick still owns its placement until its `finally`
            # has run, and that will release the slot it has just been given.
            if not placement.done():
                placement.set_result(assignment.decision)
        if self._hopeless():
            for placement in self._placements.values():
                if not placement.done():
                    placement.set_exception(self._nobody())

    async def _place(self, course: _Course) -> Decision:
        """Wait in the queue for a replica."""
        job = course.job
        resumed = course.announced
        if self.draining and not resumed:
            raise self._nobody()
        hashes = tuple(block_hashes(job.token_ids, BLOCK_TOKENS, self._root))
        if not self._dispatcher.submit(Ticket(job.request_id, hashes), resumed=resumed):
            raise QueueFullError("the queue is full", self.retry_after_s())
        placement: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._placements[job.request_id] = placement
        queued_at = time.monotonic()
        placed = False
        try:
            self.wake()
            async with asyncio.timeout(self._queue_timeout_s):
                decision = await placement
            placed = True
        except (TimeoutError, NoReplicaError) as error:
            raise self._gave_up(error, resumed=resumed) from None
        finally:
            del self._placements[job.request_id]
            if not placed:
                # It may have been given a slot in the very tick it gave up: others wait for that.
                self._dispatcher.release(job.request_id)
                self.wake()
        self._observer.placed(decision.reason, time.monotonic() - queued_at)
        return decision

    def retry_after_s(self) -> float:
        """Return when a place in the queue should be free, from how long requests have taken."""
        if self._service_s is None or self._dispatcher.slots == 0:
            return RETRY_AFTER_S
        return max(1.0, self._service_s * self._dispatcher.queued / self._dispatcher.slots)

    def _gave_up(self, error: Exception, *, resumed: bool) -> Exception:
        if resumed:
            return GenerationFailedError("its replica was lost, and no other came in time")
        if isinstance(error, NoReplicaError):
            return error
        if self._dispatcher.slots == 0:
            return self._nobody()
        waited = f"no replica was free within {self._queue_timeout_s:g} s"
        return QueueTimeoutError(waited, self.retry_after_s())

    def _nobody(self) -> NoReplicaError:
        reason = "the server is shutting down" if self.draining else "no replica can serve"
        return NoReplicaError(reason, RETRY_AFTER_S)

    def _learn(self, service_s: float) -> None:
        mean = self._service_s
        self._service_s = service_s if mean is None else mean + SMOOTHING * (service_s - mean)


def _advance(course: _Course, output: Output | Finished) -> Tokens | Done:
    """Fold in what a replica said; return what the edge should hear."""
    match output:
        case Output(_, token_ids, logprobs, cached_tokens):
            first = not course.completion
            course.completion += token_ids
            if course.cached_tokens is None:
                course.cached_tokens = cached_tokens
            return Tokens(token_ids, logprobs, cached_tokens if first else None)
        case Finished():
            if course.cached_tokens is None:
                course.cached_tokens = output.cached_tokens
            if output.reason in {FinishReason.STOP, FinishReason.LENGTH}:
                course.over = True
                return Done(output.reason.value, course.cached_tokens)
            if output.reason is FinishReason.REFUSED:
                raise _TurnedAwayError(output.error)
            raise GenerationFailedError(output.error or "the replica gave the request up")
    raise AssertionError(output)
