"""The supervisor with real processes: started again, ended, and never left behind."""

import ast
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

import gateway.supervisor
from gateway.supervisor import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    TRANSITIONS,
    Command,
    ProcessState,
    Supervisor,
    backoff_s,
)
from tests.fakes_gateway import eventually

SLEEPS = "import time; time.sleep(600)"
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


@dataclass
class Heard:
    """A listener that remembers, and sees every step of a process in its table."""

    states: list[ProcessState] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def process_changed(self, replica_id: str, state: ProcessState, reason: str) -> None:
        assert "r0" == replica_id
        before = self.states[-1] if self.states else ProcessState.STOPPED
        assert (before, state) in TRANSITIONS
        self.states.append(state)
        self.reasons.append(reason)


def python(program: str, *arguments: str) -> Command:
    return Command("r0", [sys.executable, "-S", "-c", program, *arguments], dict(os.environ))


def gone(pid: int) -> bool:
    """Whether nothing is left of a process, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


def ignoring_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "BACKOFF_FIRST_S", 0.01)


@asynccontextmanager
async def supervised(command: Command) -> AsyncIterator[tuple[Supervisor, Heard]]:
    """Supervise for as long as the block runs; the process must be gone afterwards."""
    heard = Heard()
    supervisor = Supervisor(heard)
    task = asyncio.create_task(supervisor.run(command))
    try:
        yield supervisor, heard
    finally:
        pid = supervisor.pid("r0")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert supervisor.pid("r0") is None
        assert pid is None or gone(pid)


def pid_of(supervisor: Supervisor) -> int:
    pid = supervisor.pid("r0")
    assert pid is not None
    return pid


async def running(supervisor: Supervisor) -> int:
    await eventually(lambda: supervisor.pid("r0"), "a process")
    return pid_of(supervisor)


def test_backoff_doubles_up_to_a_limit() -> None:
    waits = [backoff_s(failures) for failures in range(1, 10)]

    assert [0.01, 0.02, 0.04] == waits[:3], "from the first one, made shorter for these tests"
    assert sorted(waits) == waits
    assert BACKOFF_MAX_S == backoff_s(16)


def test_the_real_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "BACKOFF_FIRST_S", BACKOFF_FIRST_S)

    assert [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] == [
        backoff_s(failures) for failures in range(1, 10)
    ]


def test_a_night_of_failures_does_not_overflow() -> None:
    """At one every 30 s the thousandth comes after eight hours; 2.0 ** 1024 is an exception."""
    assert BACKOFF_MAX_S == backoff_s(100_000)


def test_a_step_outside_the_table_is_our_bug() -> None:
    supervisor = Supervisor(Heard())
    supervisor._states["r0"] = ProcessState.FAILED
    with pytest.raises(AssertionError, match="r0"):
        supervisor._move("r0", ProcessState.RUNNING, "")


async def test_a_replica_runs_as_told(tmp_path: Path) -> None:
    written = tmp_path / "written"
    program = (
        "import os, sys; print(os.environ['X'], sys.argv[1:], file=open(os.environ['W'], 'w'))"
    )
    environment = {**os.environ, "X": "here", "W": str(written)}
    command = Command("r0", [sys.executable, "-S", "-c", program, "a b"], environment)
    async with supervised(command) as (_, heard):
        await eventually(lambda: ProcessState.BACKOFF in heard.states, "its end")

    assert "here ['a b']\n" == written.read_text()
    assert "exited with 0" in heard.reasons[1]


async def test_only_the_descriptors_it_is_given_reach_it(tmp_path: Path) -> None:
    """The shared store's, say; not the listening socket, nor another client's connection."""
    written = tmp_path / "written"
    program = "import os, sys; print(os.listdir('/proc/self/fd'), file=open(sys.argv[1], 'w'))"
    given, kept_r, kept_w = os.memfd_create("given", 0), *os.pipe()
    os.set_inheritable(kept_w, True)  # noqa: FBT003 - its only argument
    command = python(program, str(written))
    try:
        async with supervised(Command("r0", command.argv, command.environment, (given,))) as (
            _,
            heard,
        ):
            await eventually(lambda: ProcessState.BACKOFF in heard.states, "its end")
    finally:
        for descriptor in (given, kept_r, kept_w):
            os.close(descriptor)

    had = ast.literal_eval(written.read_text())
    assert str(given) in had
    assert str(kept_w) not in had


async def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    """
    The terminal signals the whole process group: replicas that then drained by themselves would
    refuse what the gateway still has to finish.
    """
    async with supervised(python(SLEEPS)) as (supervisor, _):
        assert os.getpgid(await running(supervisor)) != os.getpgid(0)


async def test_a_replica_that_ends_is_started_again_with_growing_pauses() -> None:
    async with supervised(python("raise SystemExit(5)")) as (supervisor, heard):
        await eventually(lambda: heard.states.count(ProcessState.RUNNING) == 3, "three starts")
        restarts = supervisor.restarts["r0"]

    running_, backoff = ProcessState.RUNNING, ProcessState.BACKOFF
    assert [running_, backoff, running_, backoff, running_] == heard.states[:5]
    assert [
        "exited with 5; starting again in 0.01 s",
        "exited with 5; starting again in 0.02 s",
    ] == heard.reasons[1:4:2]
    assert 2 == restarts


async def test_after_a_long_life_the_pauses_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.supervisor, "HEALTHY_AFTER_S", 0.0)
    async with supervised(python("raise SystemExit(5)")) as (_, heard):
        await eventually(lambda: heard.states.count(ProcessState.RUNNING) == 3, "three starts")

    assert {"exited with 5; starting again in 0.01 s"} == set(heard.reasons[1:4:2])


async def test_exit_code_2_is_for_good(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong setting or model does not become right by trying again."""
    heard = Heard()
    supervisor = Supervisor(heard)
    await supervisor.run(python("raise SystemExit(2)"))

    assert [ProcessState.RUNNING, ProcessState.FAILED] == heard.states
    assert "exited with 2: starting it again would not help" in heard.reasons[-1]
    assert 0 == supervisor.restarts["r0"]
    assert "see its log" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 3])
async def test_the_signal_that_killed_it_is_told(number: int) -> None:
    """Also one without a name of its own: Python's enum knows only the first and the last."""
    program = f"import os; os.kill(os.getpid(), {int(number)})"
    async with supervised(python(program)) as (_, heard):
        await eventually(lambda: ProcessState.BACKOFF in heard.states, "its end")

    name = "SIGKILL" if number == signal.SIGKILL else f"signal {int(number)}"
    assert heard.reasons[1].startswith(f"killed by {name};")


async def test_a_hung_replica_is_killed_and_comes_back() -> None:
    """A stopped process would ignore SIGTERM for ever."""
    async with supervised(python(SLEEPS)) as (supervisor, heard):
        pid = await running(supervisor)
        os.kill(pid, signal.SIGSTOP)
        supervisor.kill("r0")
        await eventually(lambda: heard.states.count(ProcessState.RUNNING) == 2, "its return")
        assert gone(pid)
        assert pid != pid_of(supervisor)

    assert "killed by SIGKILL" in heard.reasons[1]


async def test_killing_who_does_not_run_is_harmless() -> None:
    supervisor = Supervisor(Heard())
    supervisor.kill("r0")

    assert supervisor.pid("r0") is None


def test_killing_who_has_just_ended_is_harmless() -> None:
    """
    Between a process's end and the tick in which `run` hears of it, uvloop refuses to signal it;
    the link's verdict of silence may come just then.
    """

    async def scenario() -> None:
        async with supervised(python(SLEEPS)) as (supervisor, heard):
            os.kill(await running(supervisor), signal.SIGKILL)
            process = supervisor._processes["r0"]
            while process.returncode is None:  # noqa: ASYNC110 - to be there in that very tick
                await asyncio.sleep(0)
            supervisor.kill("r0")
            await eventually(lambda: heard.states.count(ProcessState.RUNNING) == 2, "its return")

    uvloop.run(scenario())


async def test_when_cancelled_it_ends_the_replica(tmp_path: Path) -> None:
    """SIGTERM first: the replica may tidy up."""
    ended, ready = tmp_path / "ended", tmp_path / "ready"
    program = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "w").close()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[2], "w").close()
time.sleep(600)
"""
    async with supervised(python(program, str(ended), str(ready))) as (supervisor, heard):
        pid = await running(supervisor)
        await eventually(ready.exists, "the handler")

    assert ended.exists()
    assert gone(pid)
    assert [ProcessState.RUNNING] == heard.states, "nobody need hear of an end that was wanted"


async def test_who_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.supervisor, "STOP_S", 0.05)
    ready = tmp_path / "ready"
    async with supervised(python(STUBBORN, str(ready))) as (supervisor, _):
        pid = await running(supervisor)
        await eventually(ready.exists, "it to become stubborn")
        assert ignoring_sigterm(pid)

    assert gone(pid)


async def test_cancelled_twice_it_still_leaves_nothing_behind(tmp_path: Path) -> None:
    """When a loop fails during shutdown, everything is cancelled once more."""
    ready = tmp_path / "ready"
    async with supervised(python(STUBBORN, str(ready))) as (supervisor, _):
        pid = await running(supervisor)
        await eventually(ready.exists, "it to become stubborn")
        (task,) = [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__name__", "") == "run"
        ]
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not gone(pid), "it is being waited for"

    assert gone(pid)


async def test_cancelled_between_two_lives_it_starts_no_other() -> None:
    heard = Heard()
    task = asyncio.create_task(Supervisor(heard).run(python("raise SystemExit(5)")))
    await eventually(lambda: ProcessState.BACKOFF in heard.states, "a pause")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


UNUSABLE = {
    "absent": "No such file or directory",
    "plain": "Permission denied",
    "directory": "Permission denied",
    "plain/below": "Not a directory",
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_program_that_cannot_be_run_is_a_failure_with_a_reason(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    run: Any,  # noqa: ANN401 - either of two with different keywords
) -> None:
    """No numactl, say. The gateway must tell so, not fall over."""
    (tmp_path / "plain").write_text("")
    (tmp_path / "directory").mkdir()
    heard = Heard()
    argv = [str(tmp_path / name), "--", "true"]
    coroutine: Coroutine[Any, Any, None] = Supervisor(heard).run(Command("r0", argv, {}))
    run(coroutine)

    assert [ProcessState.FAILED] == heard.states
    assert [f"cannot start {argv[0]}: {UNUSABLE[name]}"] == heard.reasons
    assert ["ERROR"] == [record.levelname for record in caplog.records]


def lowest_free_descriptor() -> int:
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    return min(set(range(len(used) + 1)) - used)


async def test_scarce_resources_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """No file descriptor now does not mean none in a second."""
    caplog.set_level(logging.WARNING, "gateway.supervisor")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
    try:
        async with supervised(python(SLEEPS)) as (supervisor, heard):
            await eventually(lambda: len(heard.states) >= 2, "two attempts")
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await running(supervisor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert [ProcessState.BACKOFF] * 2 == heard.states[:2]
    assert "Too many open files; starting again in 0.01 s" in heard.reasons[0]
    assert ProcessState.RUNNING is heard.states[-1]
