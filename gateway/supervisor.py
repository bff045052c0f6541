"""Start the replicas of this machine, start them again when they end, and stop them all at last.

Knows processes; knows nothing of requests or of what a replica computes. Whether a replica serves
is learned from its connection, not from its process. Each replica is started through numactl, dies
with this process whatever ends it (prctl's PDEATHSIG), and leaves nothing behind.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
HEALTHY_AFTER_S = 30.0
"""A replica that lived this long was well: its next restart begins with the first backoff."""
STOP_S = 5.0
"""What a replica gets to exit by itself after SIGTERM."""
EXIT_CONFIGURATION = 2
"""A replica's exit code for what starting again would not mend."""


class ProcessState(Enum):
    """Where a replica's process is in its life."""

    STOPPED = "stopped"
    RUNNING = "running"
    BACKOFF = "backoff"
    FAILED = "failed"
    """It will not be started again."""


TRANSITIONS: frozenset[tuple[ProcessState, ProcessState]] = frozenset(
    {
        (ProcessState.STOPPED, ProcessState.RUNNING),
        (ProcessState.RUNNING, ProcessState.BACKOFF),
        (ProcessState.RUNNING, ProcessState.FAILED),
        (ProcessState.BACKOFF, ProcessState.RUNNING),
    }
)


@dataclass(frozen=True, slots=True)
class Command:
    """How one replica is started."""

    replica_id: str
    argv: Sequence[str]
    environment: Mapping[str, str]


class Listener(Protocol):
    """Who hears of the processes. Called on the event loop; must not wait."""

    def process_changed(self, replica_id: str, state: ProcessState, reason: str) -> None: ...


def backoff_s(failures: int) -> float:
    """Return the wait before the next start after `failures` short lives in a row, in seconds."""
    assert failures > 0
    return min(BACKOFF_FIRST_S * 2.0 ** (failures - 1), BACKOFF_MAX_S)


class Supervisor:
    """Owns the processes: `run` keeps one alive for as long as it is not cancelled."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._states: dict[str, ProcessState] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.restarts: dict[str, int] = {}

    async def run(self, command: Command) -> None:
        """Start the replica, and start it again unless that would not help.

        When cancelled, ends the replica (SIGTERM, and SIGKILL after `STOP_S`) before returning.
        """
        name = command.replica_id
        self._states[name] = ProcessState.STOPPED
        self.restarts[name] = 0
        failures = 0
        while True:
            started = time.monotonic()
            code = await self._live(command)
            if code == EXIT_CONFIGURATION:
                reason = "it exited with 2: starting it again would not help; see its log"
                log.error("%s: %s", name, reason)
                self._move(name, ProcessState.FAILED, reason)
                return
            failures = 1 if time.monotonic() - started >= HEALTHY_AFTER_S else failures + 1
            wait_s = backoff_s(failures)
            reason = f"{_ending(code)}; starting again in {wait_s:g} s"
            log.warning("%s: %s", name, reason)
            self._move(name, ProcessState.BACKOFF, reason)
            await asyncio.sleep(wait_s)
            self.restarts[name] += 1

    def pid(self, replica_id: str) -> int | None:
        process = self._processes.get(replica_id)
        return process.pid if process else None

    def kill(self, replica_id: str) -> None:
        """End a replica that no longer answers; `run` then starts it again."""
        process = self._processes.get(replica_id)
        if process is not None:
            log.warning("%s: killing pid %d", replica_id, process.pid)
            process.kill()

    async def _live(self, command: Command) -> int:
        """Run the process once, from start to end; return its exit code."""
        process = await asyncio.create_subprocess_exec(
            *command.argv, env=command.environment, stdin=asyncio.subprocess.DEVNULL
        )
        self._processes[command.replica_id] = process
        self._move(command.replica_id, ProcessState.RUNNING, "")
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
            del self._processes[command.replica_id]

    def _move(self, replica_id: str, state: ProcessState, reason: str) -> None:
        was = self._states[replica_id]
        assert (was, state) in TRANSITIONS, f"{replica_id}: {was} to {state}"
        self._states[replica_id] = state
        self._listener.process_changed(replica_id, state, reason)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with {code}"
