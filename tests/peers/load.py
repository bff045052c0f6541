"""Clients that stream completions and note when each token came.

As thin as it can be: on a small machine the clients compute on the servers' cores. What arrives is
kept as bytes with its time, and read when the measurement is over.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from tests.peers.models import FIRST_PLAIN_TOKEN

EVENT_BYTES_MAX = 1 << 20
ANSWER_MAX_S = 900.0


@dataclass(frozen=True)
class Address:
    """Where a server listens, and how many tokens its model knows."""

    host: str
    port: int
    vocabulary: int

    def prompt(self, random: Random, tokens: int) -> list[int]:
        """Return a prompt that nobody has sent before."""
        return [random.randrange(FIRST_PLAIN_TOKEN, self.vocabulary) for _ in range(tokens)]


@dataclass
class Stream:
    """One streamed completion; `arrivals` grows while it runs."""

    server: Address
    prompt: Sequence[int]
    tokens_max: int
    sent: float = 0.0
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""

    async def run(self) -> None:
        """Ask, and read to the end; a refusal or a broken stream becomes `error`."""
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                await self._run()
        except (OSError, EOFError, TimeoutError) as error:
            self.error = self.error or repr(error)

    async def _run(self) -> None:
        server = self.server
        reader, writer = await asyncio.open_connection(
            server.host, server.port, limit=EVENT_BYTES_MAX
        )
        try:
            self.sent = time.perf_counter()
            writer.write(self._request())
            status = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status.partition(b"\r\n")[0]:
                self.error = (status + await reader.read(EVENT_BYTES_MAX)).decode(errors="replace")
                return
            async for event in _events(reader):
                self.arrivals.append((time.perf_counter(), event))
                if event.startswith(b"error"):
                    self.error = event.decode(errors="replace")
        finally:
            writer.close()

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "prompt": list(self.prompt),
                "max_tokens": self.tokens_max,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.server.host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    @cached_property
    def _read(self) -> list[tuple[float, dict[str, Any]]]:
        return [
            (when, json.loads(event.removeprefix(b"data: ")))
            for when, event in self.arrivals
            if event.startswith(b"data: {")
        ]

    @property
    def texts(self) -> list[tuple[float, str]]:
        """When which text came. Only of a stream that is over, as everything below."""
        return [
            (when, text)
            for when, event in self._read
            for choice in event.get("choices", [])
            if (text := choice["text"])
        ]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.texts)

    @property
    def times(self) -> list[float]:
        return [when for when, _ in self.texts]

    @property
    def first_after_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each token but the first came, and how long after the one before."""
        return [(now, now - before) for before, now in pairwise(self.times)]

    @property
    def usage(self) -> dict[str, Any]:
        found = [event["usage"] for _, event in self._read if event.get("usage")]
        return found[-1] if found else {}

    @property
    def tokens(self) -> int:
        """As the server counts them, or as many as came before the stream broke."""
        return int(self.usage.get("completion_tokens", len(self.texts)))

    @property
    def complete(self) -> bool:
        return not self.error and self.tokens == self.tokens_max


async def _events(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Undo chunked encoding, then split what a server says into its events."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *events, rest = rest.split(b"\n\n")
        for event in events:
            yield event


async def together(streams: Sequence[Stream]) -> None:
    """Run streams at once, all from the start."""
    await asyncio.gather(*(stream.run() for stream in streams))


async def in_turn(streams: Sequence[Stream], clients: int) -> None:
    """Run streams in order, `clients` of them at any time."""
    waiting = iter(streams)

    async def client() -> None:
        for stream in waiting:
            await stream.run()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


class IncompleteError(Exception):
    """A server did not answer as asked where the comparison needs it."""


def check(streams: Sequence[Stream]) -> None:
    """Raise unless every stream brought all its tokens."""
    for stream in streams:
        if not stream.complete:
            said = stream.error or f"{stream.tokens} of {stream.tokens_max} tokens"
            raise IncompleteError(f"port {stream.server.port}: {said[:500]}")


def rate(streams: Sequence[Stream]) -> float:
    """Return tokens per second from the first request to the last token."""
    served = [stream for stream in streams if stream.times]
    if not served:
        return 0.0
    begun, over = min(s.sent for s in streams), max(s.times[-1] for s in served)
    return sum(stream.tokens for stream in served) / (over - begun)


def first_token_ms(streams: Sequence[Stream]) -> float:
    return 1000 * median(stream.first_after_s for stream in streams)
