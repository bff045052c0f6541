"""A real replica server on a fake model, and links to it or to anything else that listens."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from numpy import float32
from numpy.typing import NDArray

from gateway.link import Address, ReplicaLink
from replica.batch import Batch
from replica.engine import Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.scheduler import Scheduler
from replica.server import ReplicaServer
from replica.wire import Drain, Finished, Generate
from tests.fakes import END_TOKEN_ID, FakeRunner
from tests.fakes_gateway import CONTEXT_TOKENS, FACTS, GREEDY, Heard

SILENCE_MAX_S = 10.0
"""Nobody here is silent for so long, except in the tests about it."""
PARALLEL = 4


def request(name: str, *prompt: int, tokens_max: int = 8) -> Generate:
    token_ids = list(prompt) or [1, 2, 3]
    return Generate(name, token_ids, len(token_ids), tokens_max, GREEDY, ignore_eos=True)


async def collect(link: ReplicaLink, asked: Generate) -> tuple[list[int], Finished]:
    """Run a request to its end; return its tokens and the last word on it."""
    tokens: list[int] = []
    async with aclosing(link.generate(asked)) as said:
        async for each in said:
            if isinstance(each, Finished):
                return tokens, each
            tokens += each.token_ids
    raise AssertionError("a stream ended without Finished")


class GatedRunner(FakeRunner):
    """Computes so many batches as asked for, and the rest when let."""

    def __init__(self) -> None:
        super().__init__(PARALLEL, CONTEXT_TOKENS)
        self.gate = threading.Event()
        self.free_steps = 10**9
        self.begun = 0

    def decode(self, batch: Batch) -> list[NDArray[float32]]:
        self.begun += 1
        if self.begun > self.free_steps:
            assert self.gate.wait(30.0)
        return super().decode(batch)


class Served:
    """A real replica server with a real engine on a fake model."""

    def __init__(self, secret: str | None = None) -> None:
        self.runner = GatedRunner()
        self.server = ReplicaServer(secret)
        kv_streams = KvStreams(PARALLEL, 16, 7, trimmable=True)
        limits = Limits(
            context_tokens=CONTEXT_TOKENS,
            vocab_tokens=self.runner.vocab_tokens,
            batch_tokens_max=8,
            shared_chunk_tokens_max=4,
            waiting_max=64,
        )
        scheduler = Scheduler(kv_streams, limits, [END_TOKEN_ID])
        loop = asyncio.get_running_loop()

        def publish(result: StepResult) -> None:
            loop.call_soon_threadsafe(self.server.publish, result)

        self.engine = Engine(self.runner, scheduler, kv_streams, publish)

    def load(self) -> None:
        self.server.ready(self.engine, FACTS)

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[None]:
        thread = threading.Thread(target=self.engine.run)
        async with self.server.listen(address):
            thread.start()
            try:
                yield
            finally:
                self.runner.gate.set()
                self.engine.send(Drain())
                await asyncio.to_thread(thread.join)


@asynccontextmanager
async def linked(
    url: str, secret: str | None = None, silence_max_s: float = SILENCE_MAX_S
) -> AsyncIterator[tuple[ReplicaLink, Heard]]:
    """Keep a link running for as long as the block; it must not end by itself."""
    heard = Heard()
    link = ReplicaLink("r0", Address(url, secret), heard, silence_max_s)
    task = asyncio.create_task(link.run())
    try:
        yield link, heard
    finally:
        assert not task.done(), "run never returns"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
