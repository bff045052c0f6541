"""Start the replicas of this machine, start them again when they end, and stop them all at last.

Knows processes; knows nothing of requests or of what a replica computes. Whether a replica serves
is learned from its connection, not from its process. Each replica is started through numactl, dies
with this process whatever ends it (prctl's PDEATHSIG), and leaves nothing behind.
"""

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
DOUBLINGS_MAX = 16
"""Far beyond `BACKOFF_MAX_S`; after a night of restarts the power itself would overflow."""
HEALTHY_AFTER_S = 30.0
"""A replica that lived this long was well: its next restart begins with the first backoff."""
STOP_S = 5.0
"""What a replica gets to exit by itself after SIGTERM."""
SCARCE = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Why a process cannot be started now, and perhaps soon; every other reason stays."""
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
        (ProcessState.STOPPED, ProcessState.BACKOFF),
        (ProcessState.STOPPED, ProcessState.FAILED),
        (ProcessState.RUNNING, ProcessState.BACKOFF),
        (ProcessState.RUNNING, ProcessState.FAILED),
        (ProcessState.BACKOFF, ProcessState.RUNNING),
        (ProcessState.BACKOFF, ProcessState.BACKOFF),
        (ProcessState.BACKOFF, ProcessState.FAILED),
    }
)


@dataclass(frozen=True, slots=True)
class Command:
    """How one replica is started."""

    replica_id: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    inherits: tuple[int, ...] = ()
    """File descriptors it is given, under the same numbers."""


class Listener(Protocol):
    """Who hears of the processes. Called on the event loop; must not wait."""

    def process_changed(self, replica_id: str, state: ProcessState, reason: str) -> None: ...


def backoff_s(failures: int) -> float:
    """Return the wait before the next start after `failures` short lives in a row, in seconds."""
    assert failures > 0
    return min(BACKOFF_FIRST_S * 2.0 ** min(failures - 1, DOUBLINGS_MAX), BACKOFF_MAX_S)


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
            try:
                code = await self._live(command)
            except OSError as error:
                ending = f"cannot start {command.argv[0]}: {os.strerror(error.errno or 0)}"
                if error.errno not in SCARCE:
                    self._give_up(name, ending)
                    return
            else:
                ending = _ending(code)
                if code == EXIT_CONFIGURATION:
                    self._give_up(name, f"{ending}: starting it again would not help; see its log")
                    return
            failures = 1 if time.monotonic() - started >= HEALTHY_AFTER_S else failures + 1
            wait_s = backoff_s(failures)
            reason = f"{ending}; starting again in {wait_s:g} s"
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
            with suppress(ProcessLookupError):  # it may have ended without `run` knowing yet
                process.kill()

    async def _live(self, command: Command) -> int:
        """Run the process once, from start to end; return its exit code."""
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=command.inherits,
            start_new_session=True,  # Ctrl-C is for us alone: we drain before replicas may end
        )
        self._processes[command.replica_id] = process
        self._move(command.replica_id, ProcessState.RUNNING, "")
        try:
            return await process.wait()
        finally:
            try:
                if process.returncode is None:
                    await _end(process)
            finally:
                del self._processes[command.replica_id]

    def _give_up(self, replica_id: str, reason: str) -> None:
        log.error("%s: %s", replica_id, reason)
        self._move(replica_id, ProcessState.FAILED, reason)

    def _move(self, replica_id: str, state: ProcessState, reason: str) -> None:
        was = self._states[replica_id]
        assert (was, state) in TRANSITIONS, f"{replica_id}: {was} to {state}"
        self._states[replica_id] = state
        self._listener.process_changed(replica_id, state, reason)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to exit, then make it; also when there is no patience left to wait."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _ending(code: int) -> str:
    if code < 0:
        names = {
            number.value: number.name for number in signal.Signals
        }  # but not all real-time ones
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"exited with {code}"
