"""A client that leaves frees its place at once, whatever the server was doing for it.

On a real socket and a real uvicorn, because how a departure is heard is theirs to change.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Literal
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.openai.edge import EdgeLimits
from tests.fakes_openai import Bench, Script, serving

Http = Literal["h11", "httptools"]
both_servers = pytest.mark.parametrize("http", ["h11", "httptools"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])
SOON_S = 10


class Client:
    """A connection with one request, to be dropped at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, url: str, *, stream: bool, missing_bytes: int = 0, **more: object
    ) -> "Client":
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        fields = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **more}
        body = json.dumps(fields).encode()
        size = len(body) + missing_bytes
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def left_alone(bench: Bench, client: Client) -> None:
    """Leave, and check that all is given back and recorded without anything else happening."""
    await client.leave()
    async with asyncio.timeout(SOON_S):
        await bench.recorder.heard.wait()
    assert not bench.generator.running
    assert 1 == len(bench.recorder.records)
    assert "client_gone" == bench.recorder.records[0].outcome


@both_servers
@streamed_or_not
async def test_leaving_the_queue_frees_the_place(http: Http, *, stream: bool) -> None:
    bench = Bench(Script(before=[asyncio.Event()]))
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=stream)
        await bench.generator.busy.wait()
        await left_alone(bench, client)
    assert 1 == len(bench.generator.closed_early)
    assert 499 == bench.recorder.records[0].code


@both_servers
@streamed_or_not
async def test_leaving_before_the_first_token_frees_the_place(http: Http, *, stream: bool) -> None:
    bench = Bench(Script([asyncio.Event()]))
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=stream)
        await bench.generator.busy.wait()
        await left_alone(bench, client)
    assert 1 == len(bench.generator.closed_early)
    assert "r0" == bench.recorder.records[0].replica_id


@both_servers
async def test_leaving_between_tokens_frees_the_place(http: Http) -> None:
    bench = Bench(Script(["Hello", asyncio.Event()]))
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=True)
        assert b"Hello" in await client.reader.readuntil(b'"Hello"')
        await left_alone(bench, client)
    assert 1 == len(bench.generator.closed_early)
    assert (200, 5) == (bench.recorder.records[0].code, bench.recorder.records[0].completion_tokens)


@both_servers
async def test_leaving_during_an_answer_frees_the_place(http: Http) -> None:
    bench = Bench(Script(["Hello", asyncio.Event()]))
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=False)
        await bench.generator.busy.wait()
        await left_alone(bench, client)
    assert 1 == len(bench.generator.closed_early)


@both_servers
async def test_leaving_with_several_choices_frees_all_their_places(http: Http) -> None:
    bench = Bench(Script(["Hello", asyncio.Event()]), Script([asyncio.Event()]))
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=True, n=2)
        await client.reader.readuntil(b'"Hello"')
        await left_alone(bench, client)
    assert 2 == len(bench.generator.closed_early)


@both_servers
async def test_leaving_within_the_body_starts_nothing(http: Http) -> None:
    bench = Bench()
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=True, missing_bytes=10)
        await left_alone(bench, client)
    assert not bench.generator.jobs


@both_servers
async def test_a_client_that_never_reads_is_given_up_in_time(http: Http) -> None:
    """Or it would hold its place on the replica for ever."""
    flood = ["x" * 10] * 5000
    bench = Bench(Script(flood), limits=EdgeLimits(request_timeout_s=1), context_tokens=100_000)
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=True, logprobs=True, top_logprobs=20)
        await bench.recorder.heard.wait()
        await client.leave()
    assert "request_timeout" == bench.recorder.records[0].outcome
    assert 1 == len(bench.generator.closed_early)


@both_servers
async def test_an_answer_in_full_is_not_a_departure(http: Http) -> None:
    bench = Bench()
    async with serving(bench, http) as url, asyncio.timeout(SOON_S):
        client = await Client.ask(url, stream=True)
        await client.reader.readuntil(b"[DONE]")
        await bench.recorder.heard.wait()
        await client.leave()
    assert ["ok"] == [record.outcome for record in bench.recorder.records]
    assert not bench.generator.closed_early


@both_servers
@pytest.mark.parametrize("announced", [False, True])
async def test_a_body_of_50_mb_is_refused_and_its_sender_told(
    http: Http, *, announced: bool
) -> None:
    """The sender reads only when it has sent all, so cutting it off would tell it nothing."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 1_000_000

    bench = Bench()
    content = b" " * 50_000_000 if announced else body()
    async with serving(bench, http) as url, httpx.AsyncClient(timeout=SOON_S) as client:
        response = await client.post(f"{url}/v1/chat/completions", content=content)
    assert 413 == response.status_code
    assert 413 == bench.recorder.records[0].code
