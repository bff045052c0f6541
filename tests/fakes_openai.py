"""Working stand-ins for what the OpenAI edge stands on: a vocabulary, a data plane, an observer."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
import uvicorn
from fastapi import FastAPI

from gateway.openai.auth import ApiKeys
from gateway.openai.edge import Edge, EdgeLimits, RequestRecord
from gateway.openai.routes import install
from gateway.openai.template import ChatTemplate
from gateway.proxy import Done, Job, JobEvent, Placed, Tokens
from replica.vocab import UntokenizableError
from replica.wire import TokenLogprobs

BOS, END = 256, 257
SPECIAL = {"<s>": BOS, "<|im_end|>": END}
CONTEXT_TOKENS = 1000
MODEL = "fake-1b"


class ByteVocab:
    """One token per byte, a BOS, and an end of turn."""

    n_tokens = 258
    piece_bytes_max = 10
    bos_id: int | None = BOS
    leading_space = False

    def __init__(self, *, add_bos: bool = True) -> None:
        self.add_bos = add_bos

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if "\x01" in text:
            raise UntokenizableError("holds what cannot be tokenized")
        tokens = [BOS] if add_special and self.add_bos else []
        for part in re.split(r"(<s>|<\|im_end\|>)", text) if parse_special else [text]:
            tokens += [SPECIAL[part]] if part in SPECIAL and parse_special else part.encode()
        return tokens

    def piece(self, token_id: int) -> bytes:
        assert 0 <= token_id < self.n_tokens
        return bytes([token_id]) if token_id < BOS else b""


Step = str | bytes | Exception | asyncio.Event
"""Tokens that come together; an error to raise; or something to wait for."""


@dataclass
class Script:
    """What one job produces."""

    steps: Sequence[Step] = ("Hello", " world")
    reason: str = "stop"
    cached_tokens: int = 0
    before: Sequence[Exception | asyncio.Event] = ()
    """What happens instead of, or before, being placed."""


class FakeGenerator:
    """A data plane that follows scripts, and refuses what the real one could not serve."""

    def __init__(self, *scripts: Script, context_tokens: int = CONTEXT_TOKENS) -> None:
        self.scripts = scripts or (Script(),)
        self.jobs: list[Job] = []
        self.running: set[str] = set()
        self.closed_early: list[str] = []
        """Jobs that were cancelled before their last event."""
        self.busy = asyncio.Event()
        """Set when the first job has begun."""
        self._context_tokens = context_tokens

    async def generate(self, job: Job) -> AsyncGenerator[JobEvent]:
        self._check(job)
        script = self.scripts[len(self.jobs) % len(self.scripts)]
        self.jobs.append(job)
        self.running.add(job.request_id)
        self.busy.set()
        finished = False
        try:
            for obstacle in script.before:
                await self._wait_or_raise(obstacle)
            yield Placed(f"r{len(self.jobs) - 1}", "data-parallel")
            produced = 0
            for step in script.steps:
                if not isinstance(step, str | bytes):
                    await self._wait_or_raise(step)
                    continue
                data = step.encode() if isinstance(step, str) else step
                token_ids = list(data[: job.tokens_max - produced])
                first = produced == 0
                produced += len(token_ids)
                if token_ids:
                    cached_tokens = script.cached_tokens if first else None
                    yield Tokens(token_ids, self._logprobs(job, token_ids), cached_tokens)
                if produced == job.tokens_max:
                    break
            finished = True
            reason = "length" if produced == job.tokens_max else script.reason
            yield Done(reason, script.cached_tokens)
        finally:
            self.running.remove(job.request_id)
            if not finished:
                self.closed_early.append(job.request_id)

    def _check(self, job: Job) -> None:
        assert job.request_id not in self.running
        assert job.token_ids
        assert all(0 <= token_id < ByteVocab.n_tokens for token_id in job.token_ids)
        assert job.tokens_max >= 1
        assert len(job.token_ids) + job.tokens_max <= self._context_tokens
        assert 0 <= job.sampling.seed < 2**64

    async def _wait_or_raise(self, step: Exception | asyncio.Event) -> None:
        if isinstance(step, Exception):
            raise step
        await step.wait()

    def _logprobs(self, job: Job, token_ids: list[int]) -> list[TokenLogprobs] | None:
        count = job.sampling.logprobs
        if count is None:
            return None
        top = [(ord("a") + rank, -1.0 - rank) for rank in range(count)]
        return [TokenLogprobs(-0.5, top) for _ in token_ids]


@dataclass
class Recorder:
    """An observer that remembers."""

    records: list[RequestRecord] = field(default_factory=list)
    first_tokens: int = 0
    later_tokens: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has been recorded."""

    def on_first_token(self, seconds: float) -> None:
        assert seconds >= 0
        self.first_tokens += 1

    def on_tokens(self, gap_s: float, count: int) -> None:
        assert gap_s >= 0
        self.later_tokens += count

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.heard.set()


class Bench:
    """A whole edge on a fake data plane, and a client that speaks ASGI to it."""

    def __init__(
        self,
        *scripts: Script,
        limits: EdgeLimits | None = None,
        keys: Iterable[str] = (),
        template: str | None = None,
        add_bos: bool = True,
        context_tokens: int = CONTEXT_TOKENS,
    ) -> None:
        self.generator = FakeGenerator(*scripts, context_tokens=context_tokens)
        self.recorder = Recorder()
        self.edge = Edge(
            generator=self.generator,
            vocab=ByteVocab(add_bos=add_bos),
            template=ChatTemplate(template, bos="", eos="<|im_end|>"),
            model_id=MODEL,
            fingerprint="fp_fake",
            created=1_700_000_000,
            context_tokens=context_tokens,
            observe=self.recorder,
            limits=limits or EdgeLimits(),
        )
        self.api = FastAPI()
        install(self.api, self.edge)
        self.app = ApiKeys(self.api, keys)

    async def post(
        self, path: str, body: object, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return await self.request("POST", path, json=body, headers=headers)

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.request(method, path, json=json, content=content, headers=headers)


@contextlib.asynccontextmanager
async def serving(
    bench: Bench, http: Literal["h11", "httptools"] = "httptools"
) -> AsyncIterator[str]:
    """Serve on a real socket; yields the base URL."""
    config = uvicorn.Config(bench.app, http=http, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
