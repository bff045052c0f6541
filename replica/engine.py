"""The engine loop: the one thread that touches llama.cpp.

Others send it commands and read its `progress`; it publishes what each step changed. It knows no
socket and no event loop.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from replica.batch import AbortedError, Batch, Chunk, Move, Restore, Runner, Save
from replica.kv_streams import KvStreams
from replica.sampling import Drawn, SamplingError
from replica.scheduler import News, Scheduler
from replica.threads import ThreadTuner
from replica.wire import Cancel, Drain, EnginePhase, Generate, KvEvent, Load

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CancelAll:
    """The gateway has gone, and with it everybody who was waiting. What comes next is for another.

    The next one may use the same request ids again, so nothing is said of the old requests, not
    even that they ended.
    """

    audience: int
    """Number of the gateway that commands come from, and news goes to, from here on."""


Command = Generate | Cancel | CancelAll | Drain


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine is doing; replaced as a whole, so any thread may read it."""

    phase: EnginePhase
    ends_at: float
    """`time.monotonic()` at which the running step should be over."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything one turn of the loop changed."""

    news: News
    events: list[KvEvent]
    load: Load
    rows: int
    seconds: float
    audience: int
    """Whom the news is for: the number in the last `CancelAll`, 0 before the first."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that need not be computed, by tier."""


class Engine:
    """The loop and its inbox. `run` returns once a `Drain` has been obeyed to its end."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        kv_streams: KvStreams,
        publish: Callable[[StepResult], None],
        tuner: ThreadTuner | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._kv_streams = kv_streams
        self._publish = publish
        self._tuner = tuner
        self._interruptible: str | None = None
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._audience = 0
        self._load_told = scheduler.load
        self.progress = Progress(EnginePhase.IDLE, 0.0)

    def send(self, command: Command) -> None:
        """Hand the loop a command, from any thread."""
        self._inbox.put(command)
        if isinstance(command, Cancel) and command.request_id == self._interruptible:
            self._runner.abort()

    def run(self) -> None:
        while not self._scheduler.drained:
            news = News()
            for command in self._take_commands():
                self.obey(command, news)
            self.step(news)

    def obey(self, command: Command, news: News) -> None:
        """Carry out one command; what clients should hear of it is added to `news`."""
        match command:
            case Generate():
                finished = self._scheduler.submit(command)
                if finished:
                    news.finished.append(finished)
            case Cancel(request_id):
                finished = self._scheduler.cancel(request_id)
                if finished:
                    news.finished.append(finished)
            case CancelAll(audience):
                self._scheduler.cancel_all()
                assert not news.outputs, "commands have no tokens to tell"
                news.finished.clear()
                self._audience = audience
            case Drain():
                self._scheduler.drain()

    def step(self, news: News) -> None:
        """Compute one batch and publish it together with what the commands produced."""
        batch = self._scheduler.schedule()
        rows, seconds = 0, 0.0
        if batch is not None and self._make(batch.moves):
            rows, seconds = batch.rows, self._compute(batch, news)
        events = self._kv_streams.take_events()
        load = self._scheduler.load
        if rows or events or news.outputs or news.finished or load != self._load_told:
            self._load_told = load
            cached = self._scheduler.prefixes.take_cached_tokens()
            self._publish(StepResult(news, events, load, rows, seconds, self._audience, cached))

    def _make(self, moves: list[Move]) -> bool:
        """Make all moves; False when what was planned on top of them no longer holds."""
        sound = True
        for move in moves:
            if isinstance(move, Save):
                self._save(move)
            elif not self._runner.move(move):
                assert isinstance(move, Restore)
                log.warning("a snapshot of %d tokens could not be restored", move.keep)
                self._scheduler.restore_failed(move)
                sound = False
        return sound

    def _save(self, save: Save) -> None:
        started = time.monotonic()
        if self._runner.move(save):
            seconds = time.monotonic() - started
            self._scheduler.pace.observe_save(len(save.token_ids), seconds)

    def _compute(self, batch: Batch, news: News) -> float:
        """Decode, draw and commit a batch; return the seconds it took."""
        started = time.monotonic()
        pace = self._scheduler.pace
        self.progress = Progress(batch.phase, started + pace.expect(batch.phase, batch.rows))
        try:
            rows = self._decode(batch)
        except AbortedError:
            self._scheduler.give_up(batch)
            return time.monotonic() - started
        drawn = []
        for chunk in batch.sampled:
            drawn.append(_draw(chunk, rows[: chunk.outputs]))
            rows = rows[chunk.outputs :]
        committed = self._scheduler.commit(batch, drawn)
        news.outputs += committed.outputs
        news.finished += committed.finished
        seconds = time.monotonic() - started
        pace.observe(batch.phase, batch.rows, seconds)
        if batch.phase is EnginePhase.DECODE and self._tuner is not None and pace.curve is not None:
            undisturbed_s = pace.curve.cost_s(batch.rows + len(batch.padding))
            self._tune(self._tuner, seconds / undisturbed_s)
        return seconds

    def _tune(self, tuner: ThreadTuner, slowness: float) -> None:
        before = tuner.threads
        if tuner.observe(slowness, time.monotonic()) != before:
            self._runner.set_threads(tuner.threads)

    def _decode(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Compute a batch; one that reads a single prompt ends early if that is cancelled.

        A cancel that comes too late may end the next batch instead. That is only repeated.
        """
        if batch.phase is EnginePhase.PREFILL and len(batch.chunks) == 1:
            self._interruptible = batch.chunks[0].sequence.request_id
        try:
            return self._runner.decode(batch)
        finally:
            self._interruptible = None

    def _take_commands(self) -> list[Command]:
        """Take every waiting command, sleeping for the first one only when there is no work."""
        commands: list[Command] = []
        while self._scheduler.idle and self._inbox.empty() and (save := self._scheduler.rest()):
            self._save(save)
        if self._scheduler.idle:
            self.progress = Progress(EnginePhase.IDLE, 0.0)
            commands.append(self._inbox.get())
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except Empty:
                return commands


def _draw(chunk: Chunk, rows: list[NDArray[np.float32]]) -> list[Drawn] | SamplingError:
    """Draw a token, and one more for as long as the one before was guessed right.

    A request whose logits are no numbers fails alone, not with its batch; and if they are none
    behind a right guess, with the next one: what was drawn until then is told first.
    """
    sequence = chunk.sequence
    draws: list[Drawn] = []
    try:
        for row, guess in zip(rows, (*chunk.draft, None), strict=True):
            drawn = sequence.sampler.draw(row, sequence.completion_tokens + len(draws))
            draws.append(drawn)
            sequence.sampler.accept(drawn.token_id)
            if drawn.token_id != guess:
                break
    except SamplingError as error:
        return draws or error
    return draws
