"""Both servers, started alike: the same model, the same CPUs, the same room for sequences.

llama-server runs in its two ways of keeping KV cells. With split cells every sequence has its own
share; unified, all share one pool. Which is faster depends on the load, so ours has to beat both.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.e2e.server import serving
from tests.peers.load import Address

OURS, SPLIT, UNIFIED = "ours", "split", "unified"
THEIRS = (SPLIT, UNIFIED)
NAMES = (OURS, *THEIRS)
START_S = 120.0


class StartError(Exception):
    """A server is not up; the message says where to read why."""


@dataclass(frozen=True)
class Room:
    """Sequences at once, and tokens of each; unified KV can be cut into more slots than that."""

    parallel: int
    ctx: int
    unified_slots: int = 0


@dataclass(frozen=True)
class Setup:
    """What all servers of a comparison have in common."""

    program: Path
    model: Path
    vocabulary: int
    node: int
    our_options: tuple[str, ...]
    their_options: tuple[str, ...]
    logs: Path


@dataclass(frozen=True)
class Running:
    """The servers of a comparison, and the CPUs on which all of them compute."""

    addresses: dict[str, Address]
    cpus: tuple[int, ...]
    our_threads: int


@contextmanager
def running(setup: Setup, room: Room) -> Generator[Running]:
    """Run all three servers until the block ends."""
    with ExitStack() as stack:
        ours, cpus, threads = stack.enter_context(_numaserve(setup, room))
        addresses = {OURS: ours}
        for name in THEIRS:
            addresses[name] = stack.enter_context(_llama_server(setup, room, name, cpus))
        yield Running(addresses, cpus, threads)


@contextmanager
def _numaserve(setup: Setup, room: Room) -> Generator[tuple[Address, tuple[int, ...], int]]:
    with ExitStack() as stack:
        starting = serving(
            *("--model", str(setup.model), "--mode", "single", "--nodes", str(setup.node)),
            *("--parallel", str(room.parallel), "--ctx", str(room.ctx), *setup.our_options),
        )
        try:
            server = stack.enter_context(starting)
        except AssertionError as error:
            raise StartError(f"numaserve did not start: {error}") from None
        (replica,) = server.replicas()
        url = urlsplit(server.url)
        assert url.hostname
        assert url.port
        try:
            address = Address(url.hostname, url.port, setup.vocabulary)
            yield address, tuple(replica["cpus"]), replica["threads"]
        finally:
            (setup.logs / "numaserve.log").write_text(server.log)


@contextmanager
def _llama_server(setup: Setup, room: Room, name: str, cpus: tuple[int, ...]) -> Generator[Address]:
    slots = room.parallel
    if name == UNIFIED:
        slots = room.unified_slots or slots
    port = _free_port()
    command = [
        *_binding(cpus, setup.node),
        *(str(setup.program), "--model", str(setup.model)),
        *("--host", "127.0.0.1", "--port", str(port), "--no-webui"),
        *("--threads", str(len(cpus)), "--threads-batch", str(len(cpus))),
        *("--parallel", str(slots), "--ctx-size", str(room.ctx * room.parallel)),
        *("--flash-attn", "on", "--kv-unified" if name == UNIFIED else "--no-kv-unified"),
        *setup.their_options,
    ]
    with (setup.logs / f"llama-server-{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_healthy(process, port, log.name)
            yield Address("127.0.0.1", port, setup.vocabulary)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _binding(cpus: tuple[int, ...], node: int) -> list[str]:
    """Return what binds a command as our replica is bound."""
    numbers = ",".join(map(str, cpus))
    if shutil.which("numactl"):
        return ["numactl", f"--physcpubind={numbers}", f"--membind={node}"]
    return ["taskset", "--cpu-list", numbers]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"llama-server ended with {process.returncode}: see {log}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise StartError(f"llama-server did not start in {START_S:g} s: see {log}")
