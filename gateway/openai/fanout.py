"""All jobs of one request at once, their events in one queue.

Whatever ends the request, leaving the `async with` closes every job. Knows no text and no HTTP.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from gateway.openai.edge import Generator
from gateway.proxy import Done, Job, JobEvent

EVENTS_MAX = 256
"""Events that may wait for a slow client before the jobs have to wait for it, too."""


class Fanout:
    """Runs jobs side by side; `next` gives what they say, with the number of the job."""

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        assert jobs
        self._generator = generator
        self._jobs = jobs
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, JobEvent | Exception]] = asyncio.Queue(EVENTS_MAX)
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._pump(index, job)) for index, job in enumerate(self._jobs)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self, index: int) -> None:
        """Close a job whose end was decided here. Harmless when it has ended."""
        self._tasks[index].cancel()

    async def next(self, patience_s: float) -> list[tuple[int, JobEvent]]:
        """Return everything new, at least one event; nothing after `patience_s` of silence.

        Raises what a job raised, after all that had been said before it.
        """
        if self._error is not None:
            raise self._error
        events: list[tuple[int, JobEvent]] = []
        if self._queue.empty():
            try:
                async with asyncio.timeout(patience_s):
                    index, event = await self._queue.get()
            except TimeoutError:
                return events
        else:
            index, event = self._queue.get_nowait()
        while not isinstance(event, Exception):
            events.append((index, event))
            if self._queue.empty():
                return events
            index, event = self._queue.get_nowait()
        self._error = event
        if events:
            return events
        raise event

    async def _pump(self, index: int, job: Job) -> None:
        event: JobEvent | None = None
        try:
            async with aclosing(self._generator.generate(job)) as events:
                async for event in events:
                    await self._queue.put((index, event))
            assert isinstance(event, Done), "a job that does not raise ends with Done"
        except Exception as error:  # noqa: BLE001 - raised by `next`
            await self._queue.put((index, error))
