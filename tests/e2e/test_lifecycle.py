"""Replicas that die or hang, gateways that are stopped or killed, and what is left of them."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.e2e.server import NUMASERVE, Server, alive, serving, wait_for
from tests.gguf_samples import tiny_llama

pytestmark = pytest.mark.e2e

T = TypeVar("T")

LONG: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "stream": True}
SMALL = ("--virtual-nodes", "2", "--ctx", "2048")


async def stream_text(client: httpx.AsyncClient, prompt: str, max_tokens: int = 1500) -> str:
    """Return the text of a stream, and see that it ends properly."""
    body = LONG | {"prompt": prompt, "max_tokens": max_tokens}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def wait_beside(condition: Callable[[], T], *, what: str) -> T:
    """`wait_for`, while this loop's other tasks go on."""
    return await asyncio.to_thread(lambda: wait_for(condition, what=what))


async def running_on(server: Server, replica: int, streams: int) -> dict[str, Any]:
    """Return the replica's row once it works on so many streams."""
    await wait_beside(
        lambda: server.replicas()[replica]["running"] >= streams, what="streams running"
    )
    return server.replicas()[replica]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_survive_a_replica_that_dies_or_hangs(
    number: signal.Signals, tmp_path: Path
) -> None:
    """
    Killed or stopped in the middle, its streams go on elsewhere as if nothing had happened, and
    the replica comes back by itself. The weights are random and unquantized: a quantized model,
    talking without end beyond all it has learned, meets ties that a recomputed prompt may flip.
    """
    prompts = [f"{count} sheep" for count in range(6)]
    model = tiny_llama(tmp_path / "tiny.gguf")
    with serving(*SMALL, "--model", str(model)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            undisturbed = [await stream_text(client, prompt) for prompt in prompts]
            streams = [asyncio.create_task(stream_text(client, prompt)) for prompt in prompts]
            victim = await running_on(server, 1, streams=2)
            os.kill(victim["pid"], number)
            disturbed = await asyncio.gather(*streams)
        assert undisturbed == disturbed
        assert server.status()["recoveries"] >= 2
        wait_for(server.all_ready, what="the replica's return")
        returned = server.replicas()[1]

        assert returned["pid"] != victim["pid"]
        assert 1 == returned["restarts"]
        assert not alive(victim["pid"])


def test_not_ready_while_no_replica_can_serve() -> None:
    with serving("--mode", "single", "--ctx", "512") as server:
        (row,) = server.replicas()
        os.kill(row["pid"], signal.SIGSTOP)
        wait_for(lambda: server.get("/ready").status_code == 503, what="not ready")
        assert 200 == server.get("/health").status_code
        wait_for(server.ready, what="ready again")


async def test_sigterm_lets_running_requests_finish() -> None:
    with serving(*SMALL) as server:
        pids = [row["pid"] for row in server.replicas()]
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            stream = asyncio.create_task(stream_text(client, "a sheep"))
            await wait_beside(lambda: not server.idle(), what="the request running")
            server.process.send_signal(signal.SIGTERM)
            assert await stream
        assert 0 == server.process.wait(30)
        assert not any(alive(pid) for pid in pids)
        assert runtime_dirs(server.process.pid) == []


def test_a_second_sigterm_stops_at_once() -> None:
    with serving(*SMALL) as server:
        pids = [row["pid"] for row in server.replicas()]
        body = {"prompt": "a sheep", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            assert response.status_code == 200
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "stopping" in server.log, what="draining")
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(30)
        assert 3 == code
        assert not any(alive(pid) for pid in pids)


def test_kill_9_of_the_gateway_leaves_no_process_behind() -> None:
    before = set(Path("/dev/shm").iterdir())  # noqa: S108  # shared memory lives there
    with serving(*SMALL) as server:
        pids = [row["pid"] for row in server.replicas()]
        assert -9 == server.stop(signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in pids), what="the replicas' end")
        assert set(Path("/dev/shm").iterdir()) <= before  # noqa: S108
        left = runtime_dirs(server.process.pid)
    with serving("--mode", "single", "--ctx", "512"):
        assert not any(directory.exists() for directory in left)


def runtime_dirs(pid: int) -> list[Path]:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return list(base.glob(f"numaserve-{pid}-*"))


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    options = ("--mode", "single", "--parallel", "1", "--queue-max", "1", "--ctx", "2048")
    with serving(*options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            first = asyncio.create_task(stream_text(client, "one"))
            await running_on(server, 0, 1)
            second = asyncio.create_task(stream_text(client, "two", max_tokens=4))
            await wait_beside(lambda: server.status()["waiting"], what="one waiting")
            third = await client.post("/v1/completions", json={"prompt": "three"})
            assert 429 == third.status_code
            assert int(third.headers["retry-after"]) >= 1
            assert await first
            assert await second


def test_keys_are_asked_for_everywhere_but_at_the_probes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsesame\n")
    with serving(
        "--mode", "single", "--ctx", "512", "--api-key-file", str(keys), key="sesame"
    ) as it:
        for path in ("/health", "/ready", "/metrics"):
            assert 200 == httpx.get(it.url + path).status_code, path
        for path in ("/v1/models", "/admin/status"):
            assert 401 == httpx.get(it.url + path).status_code, path
            assert 200 == it.get(path).status_code, path
            wrong = httpx.get(it.url + path, headers={"authorization": "Bearer open"})
            assert 401 == wrong.status_code, path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodes", "7"), "--nodes"),
        (("--api-key-file", "/no/such/file"), "--api-key-file"),
        (("--model", "/no/such.gguf"), "/no/such.gguf"),
        (("--model", __file__), "GGUF"),
        (("--ctx", "1"), "--ctx"),
        (("--parallel", "many"), "--parallel"),
        (("--ctx", "1000000", "--parallel", "256"), "GiB"),
        (("--virtual-nodes", "4096"), "--virtual-nodes"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: tuple[str, ...], said: str) -> None:
    done = run_up("--port", "0", *options)

    assert 2 == done.returncode, done.stderr
    assert 1 == len(done.stderr.splitlines()), done.stderr
    assert said in done.stderr


def test_a_taken_port_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_up("--port", str(port))

    assert 2 == done.returncode
    assert 1 == len(done.stderr.splitlines())
    assert f"--port {port}" in done.stderr


def run_up(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [NUMASERVE, "up", *options], capture_output=True, text=True, timeout=60, check=False
    )
