"""Serving and stopping, with real signals in real processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

PROGRAM = """
import asyncio, socket, sys
import gateway.serve
import uvloop
from gateway.serve import Shutdown, serve

gateway.serve.LAST_BYTES_S = 600  # nobody here may rely on it
running = 0
at_rest = asyncio.Event()
at_rest.set()
release = asyncio.Event()
trouble = asyncio.Event()
draining = False


async def app(scope, receive, send):
    "GET / answers at once; GET /slow when released by GET /release; GET /trouble makes some."
    global running
    if scope["path"] == "/release":
        release.set()
    if scope["path"] == "/trouble":
        trouble.set()
    if scope["path"] == "/later":
        await asyncio.sleep(0.15)  # in which uvicorn looks at least once whether to stop
    body = str(draining).encode()
    if scope["path"] == "/slow":
        running += 1
        at_rest.clear()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        try:
            await release.wait()
        finally:
            running -= 1
            if not running:
                at_rest.set()
        await send({"type": "http.response.body", "body": b"ended"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def drain():
    global draining
    draining = True
    print("draining", flush=True)
    await at_rest.wait()


async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("loop ended", flush=True)


async def failing():
    await trouble.wait()
    raise ValueError("a loop of ours is broken")


async def returning():
    await asyncio.sleep(0)


async def giving_up(shutdown):
    await trouble.wait()
    shutdown.fail(1)


async def main():
    shutdown = Shutdown(float(sys.argv[2]))
    loops = {
        "forever": forever,
        "failing": failing,
        "returning": returning,
        "giving_up": lambda: giving_up(shutdown),
    }
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    return await serve(app, listener, [loops[name]() for name in sys.argv[3:]], shutdown, drain)


sys.exit({"asyncio": asyncio.run, "uvloop": uvloop.run}[sys.argv[1]](main()))
"""


class Process:
    """The program above, running."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.line()}", timeout=30)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> tuple[str, str]:
        """Wait for the end; return what was still written to stdout and stderr."""
        return self.process.communicate(timeout=30)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def running(*loops: str, drain_timeout_s: float = 60.0, loop: str = "asyncio") -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, loop, str(drain_timeout_s), *loops],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            made = Process(process)
            assert 200 == made.client.get("/").status_code
            yield made
            made.client.close()
        finally:
            process.kill()


BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@BOTH
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_one_signal_ends_an_idle_server_well(number: signal.Signals, loop: str) -> None:
    """Exit code 0, and every loop had its say: uvicorn alone would die of the signal it caught."""
    with running("forever", "forever", loop=loop) as process:
        process.signal(number)
        out, err = process.rest()

    assert 0 == process.process.returncode
    assert "draining\nloop ended\nloop ended\n" == out
    assert "" == err


@BOTH
def test_what_runs_may_finish(number: signal.Signals) -> None:
    with running("forever") as process:
        with process.client.stream("GET", "/slow") as response:
            chunks = response.iter_text()
            assert "begun " == next(chunks)
            process.signal(number)
            assert "draining" == process.line()
            for path in ("/later", "/later", "/release"):
                with httpx.Client(base_url=process.client.base_url) as other:
                    assert "True" == other.get(path).text, "others are still answered"
            assert "ended" == "".join(chunks)
        process.rest()

    assert 0 == process.process.returncode


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(second: signal.Signals) -> None:
    """Exit code 3 says that somebody's request was cut."""
    with running("forever") as process:
        with process.client.stream("GET", "/slow") as response:
            chunks = response.iter_text()
            assert "begun " == next(chunks)
            process.signal(signal.SIGTERM)
            assert "draining" == process.line()
            process.signal(second)
            with pytest.raises(httpx.RemoteProtocolError):
                "".join(chunks)
        out, err = process.rest()

    assert 3 == process.process.returncode
    assert "loop ended\n" == out
    assert "stopped before every request had finished" in err


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.05])
def test_patience_has_an_end(drain_timeout_s: float) -> None:
    with running("forever", drain_timeout_s=drain_timeout_s) as process:
        with process.client.stream("GET", "/slow") as response:
            chunks = response.iter_text()
            assert "begun " == next(chunks)
            process.signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                "".join(chunks)
        process.rest()

    assert 3 == process.process.returncode


def test_no_patience_is_needed_where_nothing_runs() -> None:
    with running(drain_timeout_s=0.0) as process:
        process.signal(signal.SIGTERM)
        process.rest()

    assert 0 == process.process.returncode


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_loop_that_fails_ends_the_process(loop: str) -> None:
    """Open streams included: half a server must not look like a whole one."""
    with running("forever", "failing", loop=loop) as process:
        with process.client.stream("GET", "/slow") as response:
            chunks = response.iter_text()
            assert "begun " == next(chunks)
            with (
                httpx.Client(base_url=process.client.base_url) as other,
                suppress(httpx.TransportError),
            ):
                other.get("/trouble")
        out, err = process.rest()

    assert 1 == process.process.returncode
    assert "loop ended\n" == out
    assert "a loop of ours is broken" in err


def test_a_loop_that_returns_ends_nothing() -> None:
    with running("returning") as process:
        assert 200 == process.client.get("/").status_code
        process.signal(signal.SIGTERM)
        process.rest()

    assert 0 == process.process.returncode


def test_giving_up_has_its_own_exit_code() -> None:
    """As when every replica has failed for good."""
    with running("forever", "giving_up") as process:
        with suppress(httpx.TransportError):  # the answer may not come any more
            process.client.get("/trouble")
        out, _ = process.rest()

    assert 1 == process.process.returncode
    assert out.endswith("loop ended\n")


def test_giving_up_keeps_its_code_though_a_request_is_cut() -> None:
    with running("giving_up") as process:
        with process.client.stream("GET", "/slow") as response:
            assert "begun " == next(response.iter_text())
            with (
                httpx.Client(base_url=process.client.base_url) as other,
                suppress(httpx.TransportError),
            ):
                other.get("/trouble")
        process.rest()

    assert 1 == process.process.returncode
