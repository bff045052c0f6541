"""The private directory: ours alone, gone afterwards, and cleared of the dead."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.runtime_dir import remove_orphans, runtime_dir

DEAD_PID = 2**22 + 1
"""Above the kernel's largest possible pid."""


def started(pid: int) -> int:
    """Field 22 of proc(5), found another way than the code under test finds it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split(" ")[22 - 3])


def leave(base: Path, pid: int, start: int) -> Path:
    directory = base / f"numaserve-{pid}-{start}-abcd_ef1"
    directory.mkdir()
    (directory / "replica-0.sock").write_text("")
    return directory


def fake_process(proc: Path, pid: int, start: int, name: str = "python3") -> None:
    (proc / str(pid)).mkdir(parents=True)
    others = " ".join(map(str, range(4, 22)))
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {others} {start} 23 24\n")


def test_it_is_for_its_owner_alone_and_gone_afterwards(tmp_path: Path) -> None:
    with runtime_dir(tmp_path) as directory:
        assert 0o700 == stat.S_IMODE(directory.stat().st_mode)
        assert tmp_path == directory.parent
        (directory / "replica-0.sock").write_text("")

    assert [] == list(tmp_path.iterdir())


def test_it_is_gone_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyError), runtime_dir(tmp_path):
        raise KeyError

    assert [] == list(tmp_path.iterdir())


def test_that_it_is_gone_already_is_no_error(tmp_path: Path) -> None:
    with runtime_dir(tmp_path) as directory:
        directory.rmdir()


def test_two_in_one_process_are_apart(tmp_path: Path) -> None:
    with runtime_dir(tmp_path) as first, runtime_dir(tmp_path) as second:
        assert first != second
        assert first.is_dir(), "the second does not take the first for an orphan"


def test_its_name_carries_pid_and_start(tmp_path: Path) -> None:
    pid = os.getpid()
    with runtime_dir(tmp_path) as directory:
        assert directory.name.startswith(f"numaserve-{pid}-{started(pid)}-")


def test_orphans_of_the_dead_are_removed(tmp_path: Path) -> None:
    """After kill -9 nobody else could."""
    orphan = leave(tmp_path, DEAD_PID, 1)

    with runtime_dir(tmp_path) as directory:
        assert [directory] == list(tmp_path.iterdir())
    assert not orphan.exists()


def test_orphans_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from gateway.runtime_dir import runtime_dir\n"
        "with runtime_dir(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (orphan,) = tmp_path.iterdir()

    assert [orphan] == remove_orphans(tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_a_living_owner_keeps_its_directory(tmp_path: Path) -> None:
    kept = leave(tmp_path, os.getppid(), started(os.getppid()))

    assert [] == remove_orphans(tmp_path)
    assert kept.is_dir()


def test_a_reused_pid_is_no_living_owner(tmp_path: Path) -> None:
    orphan = leave(tmp_path, os.getpid(), started(os.getpid()) - 1)

    assert [orphan] == remove_orphans(tmp_path)


@pytest.mark.parametrize("name", ["python3", "a) S 1 (b", "tricky (name) here"])
def test_a_process_may_have_any_name(tmp_path: Path, name: str) -> None:
    proc, base = tmp_path / "proc", tmp_path / "base"
    base.mkdir()
    fake_process(proc, 77, 1234, name)
    kept, orphan = leave(base, 77, 1234), leave(base, 77, 1235)

    assert [orphan] == remove_orphans(base, proc)
    assert kept.is_dir()


@pytest.mark.parametrize(
    "name",
    [
        "numaserve-",
        "numaserve-x-y-z",
        f"numaserve-{DEAD_PID}",
        f"numaserve-{DEAD_PID}-1",
        "numaserve-²-1-abc",
        f"other-{DEAD_PID}-1-abc",
        f"numaserve-{DEAD_PID}-1-2-abc",
    ],
)
def test_what_is_not_ours_by_name_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()

    assert [] == remove_orphans(tmp_path)
    assert (tmp_path / name).is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_what_belongs_to_another_user_is_left_alone(tmp_path: Path) -> None:
    theirs = leave(tmp_path, DEAD_PID, 1)
    os.chown(theirs, 12345, 12345)

    assert [] == remove_orphans(tmp_path)
    assert theirs.is_dir()


def test_a_link_with_such_a_name_leads_nowhere(tmp_path: Path) -> None:
    """Anybody can make one in /tmp, to have us delete what it points to."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"numaserve-{DEAD_PID}-1-abc").symlink_to(precious)
    remove_orphans(tmp_path)

    assert precious.is_dir()


def test_who_clears_at_the_same_time_is_no_obstacle(tmp_path: Path) -> None:
    """Two servers that start together find the same orphans, and one is quicker."""
    for number in range(200):
        leave(tmp_path, DEAD_PID, number)
    errors: list[BaseException] = []

    def clear() -> None:
        try:
            remove_orphans(tmp_path)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=clear) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == errors
    assert [] == list(tmp_path.iterdir())


def test_a_directory_that_vanishes_while_listed_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, not left to chance."""
    orphan = leave(tmp_path, DEAD_PID, 1)
    listed = list(tmp_path.glob("*"))
    shutil.rmtree(orphan)
    monkeypatch.setattr(Path, "glob", lambda _path, _pattern: iter(listed))

    assert [] == remove_orphans(tmp_path)
