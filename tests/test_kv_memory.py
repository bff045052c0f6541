"""Whose the KV store's memory is, who may join it, and that none of it is left behind."""

import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from replica.kv_memory import ARENA_AT, HEADER, KvStoreError
from replica.kv_store import KvStore
from tests.kv_children import (
    PAGE,
    content,
    finish,
    kill,
    prompt,
    put,
    put_pages,
    read,
    resume,
    room_for,
    start,
    wait_until_stopped,
)


@pytest.fixture
def store() -> Generator[KvStore]:
    with KvStore.create(room_for(8)) as made:
        yield made


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


# Memory without a name


def test_too_small_a_budget_is_refused() -> None:
    KvStore.create(room_for(1)).close()
    with pytest.raises(KvStoreError, match="no room for a snapshot"):
        KvStore.create(room_for(1) - 1)


def test_a_closed_store_leaves_nothing_behind() -> None:
    def mine() -> tuple[set[str], list[str]]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return open_files(), [line for line in maps if "numaserve-kv" in line]

    before = mine()
    with KvStore.create(room_for(8)) as store:
        assert 0 == os.fstat(store.fileno()).st_nlink  # no name, so it ends with its last holder
        put_pages(store, 1, 8)
        read(store, prompt(1))
    assert before == mine()


def test_a_view_that_somebody_kept_does_not_keep_the_store_open() -> None:
    store = KvStore.create(room_for(8))
    view = store._memory.view[ARENA_AT:]
    store.close()
    assert 0 == view[0]


def test_memory_is_taken_as_it_is_needed(store: KvStore) -> None:
    def taken() -> int:
        return os.fstat(store.fileno()).st_blocks * 512

    assert ARENA_AT == taken()
    put_pages(store, 1, 2)
    assert ARENA_AT + 2 * PAGE == taken()


def test_only_who_is_given_the_memory_inherits_it(store: KvStore) -> None:
    assert not os.get_inheritable(store.fileno())


def test_nobody_can_cut_the_memory_short(store: KvStore) -> None:
    """Whoever read behind its end would be killed by SIGBUS."""
    for size in (0, room_for(9)):
        with pytest.raises(PermissionError):
            os.ftruncate(store.fileno(), size)


def changed(field: str, value: int) -> Callable[[int], None]:
    def change(fd: int) -> None:
        os.pwrite(fd, value.to_bytes(8, "little"), HEADER.fields[field][1])  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed("magic", 5), "is no KV store"),
        (changed("version", 99), "version 99"),
        (changed("block_tokens", 3), "blocks of 3 tokens"),
        (lambda fd: os.ftruncate(fd, room_for(9)), "size was changed"),
        (lambda fd: os.ftruncate(fd, PAGE), "is no KV store"),
        (lambda fd: os.ftruncate(fd, 0), "is no KV store"),
    ],
)
def test_foreign_memory_is_refused(
    tmp_path: Path, change: Callable[[int], None], sentence: str
) -> None:
    with KvStore.at(tmp_path / "kv", room_for(8)) as store:
        before = open_files()
        change(store.fileno())
        with pytest.raises(KvStoreError, match=sentence):
            KvStore.attach(store.fileno())
        assert before == open_files()


def test_what_is_no_memory_at_all_is_refused() -> None:
    here, there = socket.socketpair()
    ends = os.pipe()
    with here, there:
        for fd in (here.fileno(), ends[0], 10**6):
            with pytest.raises(KvStoreError, match=f"file descriptor {fd} is no KV store"):
                KvStore.attach(fd)
    for end in ends:
        os.close(end)


# Files with a name, for replicas in separate containers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_two_processes_share_a_named_file_and_the_last_removes_it(path: Path) -> None:
    with KvStore.at(path, room_for(8)) as store:
        put(store, prompt(1), content(1, 100))
        child = start("share_a_file", path, room_for(8))
        wait_until_stopped(child)
        assert content(2, 100) == read(store, prompt(2))
    assert path.exists()
    assert "True" == resume(child)
    assert not path.exists()


def test_the_first_to_leave_does_not_remove_the_file(path: Path) -> None:
    with KvStore.at(path, room_for(8)):
        with KvStore.at(path, room_for(8)) as other:
            put(other, prompt(1), content(1, 100))
        with KvStore.at(path, room_for(8)) as another:
            assert content(1, 100) == read(another, prompt(1))
    assert not path.exists()


def test_after_a_kill_of_all_the_next_start_takes_the_file_over(path: Path) -> None:
    child = start("share_a_file", path, room_for(8))
    wait_until_stopped(child)
    kill(child)
    with KvStore.at(path, room_for(8)) as store:
        assert content(2, 100) == read(store, prompt(2))
    assert not path.exists()


def test_another_budget_for_the_same_file_is_refused(path: Path) -> None:
    with (
        KvStore.at(path, room_for(8)),
        pytest.raises(KvStoreError, match="give all its users the same budget"),
    ):
        KvStore.at(path, room_for(9))


def test_a_budget_that_the_file_system_has_no_room_for_is_refused(path: Path) -> None:
    with pytest.raises(KvStoreError, match="cannot hold a KV store of 1,125,899,906,842,624"):
        KvStore.at(path, 2**50)
    assert not path.exists()


def test_a_file_whose_maker_died_over_it_is_made_again(path: Path) -> None:
    with path.open("wb") as half_made:
        half_made.truncate(room_for(8))
    with KvStore.at(path, room_for(8)) as store:
        assert put_pages(store, 1, 8)


def test_somebody_elses_file_is_not_touched(path: Path) -> None:
    for foreign in (b"x" * room_for(8), b"letter"):
        path.write_bytes(foreign)
        with pytest.raises(KvStoreError, match="is no KV store"):
            KvStore.at(path, room_for(8))
        assert foreign == path.read_bytes()


def test_a_store_is_not_made_behind_a_link(path: Path) -> None:
    path.symlink_to(path.with_name("target"))
    with pytest.raises(KvStoreError, match="cannot open"):
        KvStore.at(path, room_for(8))


def test_a_file_that_was_replaced_is_left_alone(path: Path) -> None:
    with KvStore.at(path, room_for(8)):
        path.unlink()
        path.write_bytes(b"letter")
    assert b"letter" == path.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(path: Path) -> None:
    """Whoever made it could read every prompt."""
    path.touch()
    os.chown(path, 12345, -1)
    with pytest.raises(KvStoreError, match="belongs to another user, number 12345"):
        KvStore.at(path, room_for(8))


def test_only_its_owner_may_open_the_file(path: Path) -> None:
    """It holds what people wrote."""
    with KvStore.at(path, room_for(8)):
        assert 0o600 == path.stat().st_mode & 0o777


def test_many_may_come_and_go_at_once(path: Path) -> None:
    """One leaves last and removes the file just when another one opens it."""
    children = [start("come_and_go", path, seed) for seed in range(2)]
    assert ["done", "done"] == [finish(child) for child in children]
    assert not path.exists()
