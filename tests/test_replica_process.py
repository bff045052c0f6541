"""The replica as a process, started as its supervisor starts it: a real llama.cpp, a tiny model."""

import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed

from replica.binding import probe_membind
from replica.blocks import BLOCK_TOKENS
from replica.config import arguments, child_environment
from replica.gguf_file import read_gguf
from replica.server import CLOSE_NONSENSE, CLOSE_REPLACED
from replica.wire import (
    WIRE_VERSION,
    Cancel,
    Down,
    Drain,
    EnginePhase,
    FinishReason,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Sampling,
    Up,
    decode_up,
    encode,
)
from tests.gguf_samples import tiny_llama

pytestmark = pytest.mark.model

CONTEXT_TOKENS = 2048
PARALLEL = 8
PATIENCE_S = 60.0
GREEDY = Sampling(1, temperature=0.0)
DECODE_FAILS = """
import replica.__main__ as main
from replica.batch import DecodeError

def fail(self, batch):
    raise DecodeError("as ordered")

main.Llama.decode = fail
main.main()
"""
PUBLISH_FAILS = """
import replica.__main__ as main

def fail(self, result):
    raise RuntimeError("as ordered")

main.ReplicaServer.publish = fail
main.main()
"""
PARENT = """
import os, subprocess, sys

child = subprocess.Popen([*sys.argv[1:], f"--parent-pid={os.getpid()}"])
print(child.pid, flush=True)
child.wait()
"""

T = TypeVar("T")


async def soon(work: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await work


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@dataclass
class Child:
    """A replica process and the ways to speak to it."""

    process: Process
    path: str

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(uds=self.path)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.get(path)

    async def alive(self) -> None:
        """Wait until it listens."""

        async def ask() -> None:
            while self.process.returncode is None:
                try:
                    await self.get("/health")
                except httpx.TransportError:
                    await asyncio.sleep(0.02)
                else:
                    return

        await soon(ask())
        assert self.process.returncode is None

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[tuple[ClientConnection, Hello]]:
        """Connect as soon as the model is loaded."""
        await self.alive()
        async with AsyncExitStack() as stack:
            socket = await soon(self._connected(stack))
            hello = await heard(socket)
            assert isinstance(hello, Hello)
            yield socket, hello

    async def _connected(self, stack: AsyncExitStack) -> ClientConnection:
        while (await self.get("/wire")).status_code == 503:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.02)
        link = unix_connect(self.path, uri="ws://replica/wire", max_queue=None)
        return await stack.enter_async_context(link)

    async def ended(self) -> tuple[int, list[str]]:
        """Wait for its end; return the exit code and what it logged."""
        _, errors = await soon(self.process.communicate())
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode().splitlines()


async def started(
    tmp_path: Path,
    model: Path,
    wishes: dict[str, object] | None = None,
    *,
    before: tuple[str, ...] = (),
    program: str = "",
) -> Child:
    path = str(tmp_path / "replica.sock")
    settings: dict[str, object] = {
        "model": model,
        "listen": f"unix:{path}",
        "ctx": CONTEXT_TOKENS,
        "parallel": PARALLEL,
        "replica_id": "replica-3",
        # One thread: several wait for each other, for ever on a machine that others use too.
        "cpus": (max(os.sched_getaffinity(0)),),
        "parent_pid": os.getpid(),
    } | (wishes or {})
    python = [sys.executable, *(["-c", program] if program else ["-m", "replica"])]
    process = await asyncio.create_subprocess_exec(
        *before,
        *python,
        *arguments(settings),
        env=child_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=PIPE,
        stdout=PIPE,
    )
    return Child(process, path)


@asynccontextmanager
async def running(
    tmp_path: Path,
    model: Path,
    wishes: dict[str, object] | None = None,
    *,
    before: tuple[str, ...] = (),
) -> AsyncIterator[Child]:
    child = await started(tmp_path, model, wishes, before=before)
    try:
        yield child
    finally:
        if child.process.returncode is None:
            child.process.kill()
            await child.process.communicate()


async def heard(socket: ClientConnection) -> Up:
    data = await soon(socket.recv())
    assert isinstance(data, bytes)
    message: Up = decode_up(data)
    return message


async def say(socket: ClientConnection, *messages: Down) -> None:
    for message in messages:
        await socket.send(encode(message))


def generate(request_id: str, text: str, tokens_max: int) -> Generate:
    token_ids = list(text.encode())
    return Generate(request_id, token_ids, len(token_ids), tokens_max, GREEDY, ignore_eos=True)


async def frames_until(socket: ClientConnection, *request_ids: str) -> list[Frame]:
    frames: list[Frame] = []
    missing = set(request_ids)
    while missing:
        message = await heard(socket)
        if isinstance(message, Frame):
            frames.append(message)
            missing -= {finished.request_id for finished in message.finished}
    return frames


async def first_frame(socket: ClientConnection) -> Frame:
    while not isinstance(message := await heard(socket), Frame):
        pass
    return message


def ends(frames: list[Frame]) -> dict[str, FinishReason]:
    return {end.request_id: end.reason for frame in frames for end in frame.finished}


def tokens(frames: list[Frame]) -> int:
    return sum(len(output.token_ids) for frame in frames for output in frame.outputs)


# A life


async def test_it_introduces_itself_and_answers(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model, {"degraded": "a reason", "cpus": ()}) as child:
        async with child.wire() as (socket, hello):
            facts = hello.facts
            assert (WIRE_VERSION, [], 0) == (hello.version, hello.blocks, hello.load.running)
            assert ("replica-3", 0, "a reason") == (facts.replica_id, facts.node, facts.degraded)
            assert child.process.pid == facts.pid
            assert sorted(os.sched_getaffinity(0)) == facts.cpus
            assert 1 <= facts.threads <= len(facts.cpus)
            assert read_gguf(model).fingerprint == facts.model_fingerprint
            limits = facts.context_tokens, facts.parallel, facts.block_tokens
            assert (CONTEXT_TOKENS, PARALLEL, BLOCK_TOKENS) == limits
            assert facts.refusal is None
            assert facts.memory_local_ratio is None or facts.memory_local_ratio >= 0.99

            await say(socket, generate("a", "Once upon a time", 10), generate("b", "One", 5))
            frames = await frames_until(socket, "a", "b")
            assert list(range(1, len(frames) + 1)) == [frame.seq for frame in frames]
            assert {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH} == ends(frames)
            assert 15 == tokens(frames)
            assert 16 + 9 + 3 + 4 == frames[-1].load.kv_used_tokens

            status = (await child.get("/status")).json()
            assert "replica-3" == status["replica_id"]
            assert status["connected"]
        assert 200 == (await child.get("/health")).status_code


async def test_heartbeats_never_cease(tmp_path: Path, model: Path) -> None:
    """While it computes as while it idles; measured generously, for other people's machines."""
    loop = asyncio.get_running_loop()
    names = [str(number) for number in range(PARALLEL)]
    async with running(tmp_path, model) as child, child.wire() as (socket, _):
        await say(socket, *(generate(name, f"{name} words", 2000) for name in names))
        at, gaps, phases = loop.time(), [0.0], Counter[EnginePhase]()
        while phases[EnginePhase.DECODE] < 5 or phases[EnginePhase.IDLE] < 5:
            message = await heard(socket)
            if isinstance(message, Heartbeat):
                phases[message.phase] += 1
                gaps.append(loop.time() - at)
                at = loop.time()
                if phases[EnginePhase.DECODE] == 5:
                    await say(socket, *map(Cancel, names))
        assert max(gaps) < 1.0


async def test_what_is_cancelled_ends_and_the_rest_goes_on(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child, child.wire() as (socket, _):
        await say(socket, generate("leaves", "I leave", 1500), generate("stays", "I stay", 50))
        await first_frame(socket)
        await say(socket, Cancel("leaves"))
        frames = await frames_until(socket, "leaves", "stays")
        expected = {"leaves": FinishReason.CANCELLED, "stays": FinishReason.LENGTH}
        assert expected == ends(frames)


async def test_a_newer_gateway_takes_over(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child, child.wire() as (old, first):
        await say(old, generate("a", "word " * 30, 1500))
        await first_frame(old)
        async with child.wire() as (new, second):
            assert first.epoch == second.epoch
            await say(new, generate("a", "word " * 30, 20))
            frames = await frames_until(new, "a")
            assert (1, 20) == (frames[0].seq, tokens(frames))
            assert {"a": FinishReason.LENGTH} == ends(frames)
        assert CLOSE_REPLACED == await closed(old)


async def closed(socket: ClientConnection) -> int | None:
    try:
        while True:
            await heard(socket)
    except ConnectionClosed:
        return socket.close_code


async def test_nonsense_closes_the_connection_and_nothing_else(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child:
        async with child.wire() as (socket, _):
            await socket.send(b"\xc1nonsense")
            assert CLOSE_NONSENSE == await closed(socket)
        async with child.wire() as (socket, _):
            await say(socket, generate("a", "And yet it serves", 3))
            assert {"a": FinishReason.LENGTH} == ends(await frames_until(socket, "a"))


# Its place


@pytest.mark.skipif(not shutil.which("numactl"), reason="numactl is not installed")
async def test_under_numactl_it_computes_where_it_was_put(tmp_path: Path, model: Path) -> None:
    if refused := probe_membind([0]):
        pytest.skip(refused)
    cpu = min(os.sched_getaffinity(0))
    numactl = "numactl", f"--physcpubind={cpu}", "--membind=0", "--"
    async with (
        running(tmp_path, model, {"cpus": ()}, before=numactl) as child,
        child.wire() as (_, hello),
    ):
        assert ([cpu], 1) == (hello.facts.cpus, hello.facts.threads)
        assert child.process.pid == hello.facts.pid, "numactl has become the replica"
        assert hello.facts.memory_local_ratio is not None
        assert hello.facts.memory_local_ratio >= 0.99


async def test_the_event_loop_keeps_away_from_computing_cpus(tmp_path: Path, model: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    wishes: dict[str, object] = {"cpus": (cpus[-1],), "housekeeping_cpus": (cpus[0],)}
    async with running(tmp_path, model, wishes) as child, child.wire() as (_, hello):
        assert ([cpus[-1]], 1) == (hello.facts.cpus, hello.facts.threads)
        assert {cpus[0]} == os.sched_getaffinity(child.process.pid)


async def test_memory_on_a_strange_node_is_refused(tmp_path: Path, model: Path) -> None:
    """No process here has memory on a node 7; this one believes that it should."""
    async with running(tmp_path, model, {"nodes": (7,)}) as child, child.wire() as (_, hello):
        if hello.facts.memory_local_ratio is None:
            pytest.skip("this kernel does not tell where memory lies")
        assert (7, 0.0) == (hello.facts.node, hello.facts.memory_local_ratio)
        assert hello.facts.refusal is not None
        assert "--min-local-ratio" in hello.facts.refusal


async def test_memory_on_a_strange_node_may_be_accepted(tmp_path: Path, model: Path) -> None:
    wishes: dict[str, object] = {"nodes": (7,), "min_local_ratio": 0.0}
    async with running(tmp_path, model, wishes) as child, child.wire() as (_, hello):
        assert hello.facts.refusal is None


# Its end


async def test_a_drain_ends_it_once_all_is_said(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child:
        async with child.wire() as (socket, _):
            await say(socket, generate("runs", "Let me finish", 100), Drain())
            await say(socket, generate("late", "Me too", 5))
            frames = await frames_until(socket, "runs", "late")
            assert {"runs": FinishReason.LENGTH, "late": FinishReason.REFUSED} == ends(frames)
            assert 100 == tokens(frames)
            await closed(socket)
        assert 0 == (await child.ended())[0]


async def test_sigterm_drains(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child:
        async with child.wire() as (socket, _):
            await say(socket, generate("runs", "Let me finish", 200))
            frames = [await first_frame(socket)]
            child.process.terminate()
            frames += await frames_until(socket, "runs")
            assert {"runs": FinishReason.LENGTH} == ends(frames)
            assert 200 == tokens(frames)
            await closed(socket)
        assert 0 == (await child.ended())[0]


async def test_a_second_sigterm_ends_it_at_once(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child:
        async with child.wire() as (socket, _):
            await say(socket, *(generate(str(n), f"{n} words", 2000) for n in range(PARALLEL)))
            await first_frame(socket)
            child.process.terminate()
            refused = 0
            while not refused:
                await say(socket, generate("late", "Is it draining?", 1), Cancel("late"))
                frames = await frames_until(socket, "late")
                refused = [*ends(frames).values()].count(FinishReason.REFUSED)
            child.process.terminate()
            await closed(socket)
        assert 3 == (await child.ended())[0]


async def test_an_idle_replica_ends_on_sigterm(tmp_path: Path, model: Path) -> None:
    async with running(tmp_path, model) as child:
        async with child.wire():
            pass
        child.process.send_signal(signal.SIGINT)
        assert 0 == (await child.ended())[0]


async def test_while_it_loads_it_answers_probes_and_can_be_stopped(tmp_path: Path) -> None:
    """The file is a pipe into which nobody writes: it takes for ever to load."""
    pipe = tmp_path / "slow.gguf"
    os.mkfifo(pipe)
    async with running(tmp_path, pipe, {"fingerprint": "known"}) as child:
        await child.alive()
        assert 200 == (await child.get("/health")).status_code
        assert "loading" == (await child.get("/status")).json()["phase"]
        assert 503 == (await child.get("/wire")).status_code
        child.process.terminate()
        assert 0 == (await child.ended())[0]


async def test_it_dies_with_its_supervisor(tmp_path: Path, model: Path) -> None:
    """Also by kill -9, which the supervisor cannot tell it about."""
    path = str(tmp_path / "replica.sock")
    wishes: dict[str, object] = {
        "listen": f"unix:{path}",
        "model": model,
        "cpus": (max(os.sched_getaffinity(0)),),
    }
    replica = [sys.executable, "-m", "replica", *arguments(wishes)]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, *replica, env=child_environment(), stdout=PIPE
    )
    assert parent.stdout is not None
    pid = int(await soon(parent.stdout.readline()))
    watched = os.pidfd_open(pid)
    try:
        dead = asyncio.Event()
        asyncio.get_running_loop().add_reader(watched, dead.set)
        async with Child(parent, path).wire():
            assert not dead.is_set()
            parent.kill()
            await soon(dead.wait())
    finally:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
    await parent.communicate()


async def test_without_its_supervisor_it_does_not_begin(tmp_path: Path, model: Path) -> None:
    child = await started(tmp_path, model, {"parent_pid": 1})
    assert 3 == (await child.ended())[0]


@pytest.mark.parametrize("program", [DECODE_FAILS, PUBLISH_FAILS], ids=["decode", "publish"])
async def test_a_broken_engine_takes_the_process_down(
    tmp_path: Path, model: Path, program: str
) -> None:
    """An event loop that lives beside a dead engine must not look healthy."""
    child = await started(tmp_path, model, program=program)
    async with child.wire() as (socket, _):
        await say(socket, generate("a", "Go", 5))
        await closed(socket)
    code, lines = await child.ended()
    assert 1 == code
    assert "as ordered" in lines[-1]


# What it does not begin with


async def test_a_broken_model_ends_it_with_one_line(tmp_path: Path, model: Path) -> None:
    broken = Path(shutil.copy(model, tmp_path / "broken.gguf"))
    os.truncate(broken, 100_000)
    child = await started(tmp_path, broken)
    code, lines = await child.ended()
    assert (2, 1) == (code, len(lines))
    assert str(broken) in lines[0]


async def test_a_broken_model_of_known_name_ends_it_too(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    child = await started(tmp_path, broken, {"fingerprint": "known"})
    code, lines = await child.ended()
    assert 2 == code
    assert f"llama.cpp could not load {broken}" in lines[-1]


@pytest.mark.parametrize(
    ("wishes", "code", "words"),
    [
        ({"listen": "tcp:127.0.0.1:0"}, 2, "needs --secret-file"),
        ({"listen": "nonsense"}, 2, "--listen: 'nonsense'"),
        ({"secret_file": "/nowhere"}, 2, "--secret-file /nowhere"),
        ({"cpus": (4095,)}, 2, "cannot run on CPUs 4095"),
        ({"housekeeping_cpus": (4095,)}, 2, "cannot run on CPUs 4095"),
        ({"listen": "unix:/nowhere/replica.sock"}, 1, "cannot listen on unix:/nowhere"),
    ],
)
async def test_a_wrong_setting_ends_it_with_one_line(
    tmp_path: Path, model: Path, wishes: dict[str, object], code: int, words: str
) -> None:
    child = await started(tmp_path, model, wishes)
    found, lines = await child.ended()
    assert (code, 1) == (found, len(lines))
    assert words in lines[0]


async def test_over_tcp_it_wants_its_secret(
    tmp_path: Path, model: Path, unused_tcp_port: int
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    address = f"127.0.0.1:{unused_tcp_port}"
    wishes: dict[str, object] = {"listen": f"tcp:{address}", "secret_file": secret}
    async with running(tmp_path, model, wishes):
        right = {"authorization": "Bearer s3cret"}
        await soon(loaded(f"http://{address}/wire", right))
        async with httpx.AsyncClient(headers={"authorization": "Bearer wrong"}) as client:
            assert 200 == (await client.get(f"http://{address}/health")).status_code
            assert 401 == (await client.get(f"http://{address}/wire")).status_code
        url = f"ws://{address}/wire"
        async with connect(url, additional_headers=right, proxy=None) as socket:
            assert isinstance(await heard(socket), Hello)


async def loaded(url: str, headers: dict[str, str]) -> None:
    """Wait until somebody listens who has loaded a model."""
    async with httpx.AsyncClient(headers=headers) as client:
        status = 503
        while status == 503:
            await asyncio.sleep(0.02)
            with suppress(httpx.TransportError):
                status = (await client.get(url)).status_code
        assert 426 == status


async def test_logs_for_machines_are_json_lines(tmp_path: Path, model: Path) -> None:
    child = await started(tmp_path, model, {"log_format": "json"})
    async with child.wire() as (socket, _):
        await socket.send(b"\x00")
        await closed(socket)
    child.process.terminate()
    _, lines = await child.ended()
    logged = [json.loads(line) for line in lines]
    assert {"replica-3"} == {line["process"] for line in logged}
    assert {"info", "error"} == {line["level"] for line in logged}
    assert any("is ready on nodes" in line["event"] for line in logged)
    assert any("not a message" in line["event"] for line in logged)
