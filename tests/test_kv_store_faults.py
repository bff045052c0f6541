"""The KV store among processes that stop, die and scribble: it never returns a wrong byte."""

import os
from collections.abc import Generator

import pytest

from replica.blocks import BLOCK_TOKENS
from replica.kv_arena import Layout
from replica.kv_memory import ARENA_AT
from replica.kv_store import KvStore
from tests.kv_children import (
    NAMESPACE,
    PAGE,
    STORM_STEPS,
    content,
    find,
    finish,
    found_by,
    held,
    kill,
    names,
    page_sized,
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


# Several processes


def test_two_processes_at_once_never_read_a_wrong_byte() -> None:
    """In a store so small that most snapshots are evicted while somebody reads them."""
    with KvStore.create(room_for(70)) as store:
        children = [start("storm", seed, fd=store.fileno()) for seed in (1, 2)]
        counts = [[int(count) for count in finish(child).split()] for child in children]
        assert [0, 0] == [child.returncode for child in children]
        for puts, reads in counts:
            assert puts > STORM_STEPS / 10
            assert reads > STORM_STEPS / 10
        assert (0, 0) == (store.stats().corrupt, store.stats().resets)


def test_a_snapshot_outlives_its_writer(store: KvStore) -> None:
    child = start("put_and_die", 1, 500, fd=store.fileno())
    assert -9 == child.wait()
    finish(child)
    assert content(1, 500) == read(store, prompt(1))


def test_the_store_outlives_its_maker() -> None:
    store = KvStore.create(room_for(8))
    put(store, prompt(1), content(1, 500))
    with KvStore.attach(os.dup(store.fileno())) as other:
        store.close()
        assert content(1, 500) == read(other, prompt(1))


def test_what_was_half_written_by_the_dead_is_gone_and_its_room_is_back(store: KvStore) -> None:
    child = start("stop_while_writing", 1, page_sized(4), fd=store.fileno())
    wait_until_stopped(child)
    kill(child)
    assert find(store, prompt(1)) is None
    assert put_pages(store, 2, 8)
    assert content(2, page_sized(8)) == read(store, prompt(2))
    assert (1, 0) == (store.stats().orphans, store.stats().evictions)


def test_what_the_living_write_is_nobody_elses_however_long_they_stop(store: KvStore) -> None:
    child = start("stop_while_writing", 1, page_sized(4), fd=store.fileno())
    wait_until_stopped(child)
    assert not put_pages(store, 2, 5)
    assert put_pages(store, 3, 4)
    assert put_pages(store, 4, 4)
    assert "True" == resume(child)
    assert [1, 4] == held(store, 1, 2, 3, 4)
    assert content(1, page_sized(4)) == read(store, prompt(1))


def test_who_lost_its_place_cannot_publish_and_its_scribbles_are_found(store: KvStore) -> None:
    """Only a damaged table takes a living writer's place away."""
    child = start("stop_while_writing", 1, page_sized(4), fd=store.fileno())
    wait_until_stopped(child)
    store._memory.entries.extent[0] = -1
    assert put_pages(store, 2, 4)
    assert content(2, page_sized(4)) == read(store, prompt(2))
    assert 1 == store.stats().resets
    assert "False" == resume(child)
    assert find(store, prompt(1)) is None
    assert read(store, prompt(2)) is None
    assert (0, 1) == (store.stats().snapshots, store.stats().corrupt)


def test_a_place_that_was_lost_is_lost_even_while_nobody_else_has_it(store: KvStore) -> None:
    with KvStore.attach(os.dup(store.fileno())) as other:

        def write(view: memoryview) -> int:
            other._memory.entries.extent[0] = -1
            assert 0 == other.stats().snapshots
            return len(view)

        assert not store.put(NAMESPACE, prompt(1), names(prompt(1)), 100, write)
    assert (0, 1) == (store.stats().snapshots, store.stats().resets)


def test_whoever_is_killed_anywhere_in_a_put_harms_nobody() -> None:
    child = start("die_at_every_line")
    lines = int(finish(child) or "0")
    assert 0 == child.returncode
    assert lines > 100


def test_nobody_waits_for_a_process_that_stopped_with_the_table(store: KvStore) -> None:
    put(store, prompt(1), content(1, 100))
    there = found_by(store, prompt(1))
    child = start("stop_holding_the_table", fd=store.fileno())
    wait_until_stopped(child)
    assert find(store, prompt(1)) is None
    assert store.read(there, prompt(1)) is None
    assert not put(store, prompt(2), content(2, 100))
    assert 1 == store.stats().snapshots
    kill(child)
    assert content(1, 100) == read(store, prompt(1))
    assert put(store, prompt(2), content(2, 100))


def test_what_could_not_be_published_gives_its_room_back_later(store: KvStore) -> None:
    children = []

    def write(view: memoryview) -> int:
        child = start("stop_holding_the_table", fd=store.fileno())
        wait_until_stopped(child)
        children.append(child)
        return len(view)

    assert not store.put(NAMESPACE, prompt(1), names(prompt(1)), page_sized(8), write)
    kill(children[0])
    assert put_pages(store, 2, 8)
    assert 1 == store.stats().orphans


# What is damaged


@pytest.mark.parametrize("at", [0, BLOCK_TOKENS, 64 * 3 + 5, -1])
def test_damaged_bytes_are_not_returned(store: KvStore, at: int) -> None:
    """Whether hashes, tokens, padding or data: no parser gets to see them."""
    put(store, prompt(1, blocks=2), content(1, 1000))
    there = found_by(store, prompt(1, blocks=2))
    length = Layout(2, 32, 1000).length
    store._memory.bytes[ARENA_AT + at % length] ^= 1
    assert store.read(there, prompt(1, blocks=2)) is None
    assert (0, 1) == (store.stats().snapshots, store.stats().corrupt)
    assert put(store, prompt(1, blocks=2), content(1, 1000))
    assert content(1, 1000) == read(store, prompt(1, blocks=2))


def test_a_snapshot_that_was_replaced_is_not_read(store: KvStore) -> None:
    put_pages(store, 1, 8)
    there = found_by(store, prompt(1))
    put_pages(store, 2, 8)
    assert store.read(there, prompt(1)) is None
    assert 0 == store.stats().corrupt
    put_pages(store, 1, 8)
    assert store.read(there, prompt(1)) is None  # an equal one, but not the one that was found


def test_what_replaced_a_torn_snapshot_is_not_removed_for_it(store: KvStore) -> None:
    """The reader finds its copy torn when the entry is somebody else's already."""
    put_pages(store, 1, 8)
    there = found_by(store, prompt(1))
    put_pages(store, 2, 8)
    store._remove_corrupt(there)
    assert [2] == held(store, 1, 2)
    assert 0 == store.stats().corrupt


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", 3),
        ("state", -1),
        ("offset", 0),  # where the other one lies
        ("offset", -PAGE),
        ("offset", 8 * PAGE),
        ("offset", 2 * PAGE + 8),
        ("extent", 8 * PAGE),
        ("extent", -PAGE),
        ("blocks", 0),
        ("blocks", 2**40),
        ("tokens", 2**61),
        ("tokens", 2 * PAGE),
        ("size", -1),
        ("size", 2 * PAGE),
    ],
)
def test_a_damaged_table_is_emptied(store: KvStore, column: str, value: int) -> None:
    put_pages(store, 1, 2)
    put_pages(store, 2, 2)
    getattr(store._memory.entries, column)[1] = value
    assert [] == held(store, 1, 2)
    assert (1, 0) == (store.stats().resets, store.stats().snapshots)
    assert put_pages(store, 3, 8)
    assert [3] == held(store, 1, 2, 3)
