"""The link to a real replica server: what is asked reaches it, what it says comes back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from websockets.asyncio.server import serve

from gateway.link import Address, ReplicaLink, ReplicaLostError
from replica.wire import WIRE_VERSION, EnginePhase, Finished, FinishReason, Generate, Output
from tests.fakes import reference
from tests.fakes_gateway import CONTEXT_TOKENS, FACTS, GREEDY, Heard, eventually
from tests.fakes_link import Served, collect, linked, request


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/r.sock"


@pytest.fixture
async def served(url: str) -> AsyncIterator[Served]:
    replica = Served()
    replica.load()
    async with replica.listening(url):
        yield replica


@pytest.fixture
async def link(served: Served, url: str) -> AsyncIterator[tuple[ReplicaLink, Heard]]:
    assert served.server
    async with linked(url) as (made, heard):
        await eventually(lambda: heard.hellos, "a Hello")
        yield made, heard


Linked = tuple[ReplicaLink, Heard]


class TestRealReplica:
    async def test_it_greets_and_beats(self, link: Linked) -> None:
        _, heard = link
        assert [(WIRE_VERSION, FACTS, [])] == [(h.version, h.facts, h.blocks) for h in heard.hellos]
        await eventually(lambda: EnginePhase.IDLE in heard.phases, "a heartbeat")

    async def test_it_generates_what_it_would_alone(self, link: Linked) -> None:
        asked = request("a")
        tokens, finished = await collect(link[0], asked)

        assert reference(asked, CONTEXT_TOKENS) == tokens
        assert Finished("a", FinishReason.LENGTH, 3, 0, 8) == finished
        assert {} == link[0]._streams

    async def test_many_streams_do_not_mix(self, link: Linked) -> None:
        asked = [request(str(n), 1 + n % 5, 1 + n // 5) for n in range(40)]
        results = await asyncio.gather(*(collect(link[0], each) for each in asked))

        for each, (tokens, finished) in zip(asked, results, strict=True):
            assert reference(each, CONTEXT_TOKENS) == tokens
            assert each.request_id == finished.request_id
        assert [] == link[1].losses
        assert {} == link[0]._streams

    async def test_leaving_early_cancels(self, link: Linked, served: Served) -> None:
        """Otherwise the replica would compute for nobody, up to the last token."""
        served.runner.free_steps = 2
        async with aclosing(link[0].generate(request("a", tokens_max=50))) as said:
            await anext(said)
        await eventually(served.engine._inbox.qsize, "the Cancel, during a step")
        served.runner.gate.set()
        await eventually(lambda: link[1].frames[-1].load.running == 0, "an idle replica")

        finished = [each for frame in link[1].frames for each in frame.finished]
        assert [FinishReason.CANCELLED] == [each.reason for each in finished]
        assert {} == link[0]._streams

    async def test_leaving_after_the_end_cancels_nothing(self, link: Linked) -> None:
        posted = link[0]._outbox
        assert posted is not None
        await collect(link[0], request("a"))

        assert posted.empty()

    async def test_a_gateway_that_returns_gets_no_token_of_its_last_life(
        self, served: Served, url: str
    ) -> None:
        """
        The engine is in the middle of a step when the gateway connects anew and asks for the rest
        of the same request, under the same id. That step's token is not the next one it gets.
        """
        asked = request("a")
        whole = reference(asked, CONTEXT_TOKENS)
        served.runner.free_steps = 2
        received: list[int] = []
        async with linked(url) as (first, heard):
            await eventually(lambda: heard.hellos, "a Hello")
            async with aclosing(first.generate(asked)) as said:
                while len(received) < 2:
                    each = await anext(said)
                    assert isinstance(each, Output)
                    received += each.token_ids
                await eventually(lambda: served.runner.begun == 3, "a step to begin")
                first._outbox = None  # this gateway is dead and sends no Cancel
        rest = Generate("a", asked.token_ids + received, 3, 8, GREEDY, ignore_eos=True)
        async with linked(url) as (second, heard):
            await eventually(lambda: heard.hellos, "a Hello")
            going_on = asyncio.create_task(collect(second, rest))
            await eventually(lambda: second._outbox is not None and second._outbox.empty(), "sent")
            served.runner.gate.set()
            tokens, finished = await going_on

        assert whole == received + tokens
        assert FinishReason.LENGTH is finished.reason

    async def test_a_newer_gateway_takes_over(self, link: Linked, url: str) -> None:
        async with linked(url) as (_, heard):
            await eventually(lambda: heard.hellos, "a Hello for the second")
            await eventually(lambda: link[1].losses, "the first one's loss")

        reason, silent = link[1].losses[0]
        assert "another gateway has connected" in reason
        assert not silent


class TestConnecting:
    async def test_while_the_replica_loads_it_is_tried_again(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        replica = Served()
        async with replica.listening(url), linked(url) as (_, heard):
            await eventually(lambda: "HTTP 503" in caplog.text, "a 503")
            assert [] == heard.hellos
            replica.load()
            await eventually(lambda: heard.hellos, "a Hello")

        assert [] == heard.losses, "what was never there cannot be lost"

    async def test_before_the_replica_listens_it_is_tried_again(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        async with linked(url) as (_, heard):
            await eventually(lambda: "not reachable yet" in caplog.text, "a failure to connect")
            replica = Served()
            replica.load()
            async with replica.listening(url):
                await eventually(lambda: heard.hellos, "a Hello")

    async def test_over_tcp_the_secret_must_be_right(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for our own replicas
        replica = Served(secret="right")  # noqa: S106 - a test's
        replica.load()
        async with serve(replica.server._converse, "127.0.0.1", 0) as spare:
            port = spare.sockets[0].getsockname()[1]
        url = f"tcp:127.0.0.1:{port}"
        async with replica.listening(url):
            for wrong in ("wrong", None):
                caplog.clear()
                async with linked(url, wrong) as (_, heard):
                    await eventually(lambda: "HTTP 401" in caplog.text, "a 401")
                    assert [] == heard.hellos
            async with linked(url, "right") as (link, heard):
                await eventually(lambda: heard.hellos, "a Hello")
                tokens, _ = await collect(link, request("a"))

        assert reference(request("a"), CONTEXT_TOKENS) == tokens

    async def test_without_a_connection_a_request_is_lost_at_once(self, url: str) -> None:
        async with linked(url) as (link, _):
            with pytest.raises(ReplicaLostError, match="r0 is not connected"):
                await collect(link, request("a"))
            assert {} == link._streams


def test_an_address_shows_its_secret_to_nobody_else() -> None:
    """It ends up in logs and tracebacks."""
    assert "hidden" not in repr(Address("tcp:h:1", "hidden"))
