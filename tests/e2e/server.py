"""A real server for the end-to-end tests: started as a user starts it, spoken to over HTTP."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

START_S = 60.0
NUMASERVE = str(Path(sys.executable).with_name("numaserve"))


def wait_for(condition: Callable[[], T], *, what: str, within_s: float = 30.0) -> T:
    """Return the condition's first true value; fail, saying what was waited for."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass
class Server:
    """A running `numaserve up`."""

    process: subprocess.Popen[str]
    key: str | None = None
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def read(self) -> None:
        """Follow stderr; its reader thread's whole life."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.get(self.url + path, timeout=10, headers=headers)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.get("/admin/status").json()
        return document

    def replicas(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.status()["replicas"]
        return rows

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return self.get("/ready").status_code == 200

    def all_ready(self) -> bool:
        return all(row["state"] == "ready" for row in self.replicas())

    def idle(self) -> bool:
        """Nothing runs or waits anywhere, by the replicas' own account."""
        status = self.status()
        return status["concurrency"] == 0 and all(
            row["running"] == row["waiting"] == 0 for row in status["replicas"]
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def serving(*options: str, key: str | None = None) -> Generator[Server]:
    """Run `numaserve up` on a free port until the block ends; every replica is ready."""
    process = subprocess.Popen(
        [NUMASERVE, "up", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Server(process, key)
    reader = threading.Thread(target=server.read)
    reader.start()
    try:
        found = wait_for(
            lambda: re.search(r"listening (http://\S+)/v1", server.log) or process.poll(),
            what="the server's address",
        )
        assert isinstance(found, re.Match), server.log
        server.url = found[1]
        wait_for(lambda: _answers(server), what="an answer from /health")
        wait_for(server.all_ready, what="all replicas ready", within_s=START_S)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def _answers(server: Server) -> bool:
    assert server.process.poll() is None, server.log
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False
