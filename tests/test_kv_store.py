"""What the KV store finds, what it keeps, and what it gives up for it."""

import os
from collections import OrderedDict
from collections.abc import Generator
from itertools import takewhile, zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.blocks import BLOCK_TOKENS
from replica.kv_arena import ENTRIES_MAX
from replica.kv_memory import ARENA_AT
from replica.kv_store import KvStore
from tests.kv_children import (
    NAMESPACE,
    PAGE,
    content,
    find,
    found_by,
    held,
    names,
    page_sized,
    prompt,
    put,
    put_pages,
    read,
    room_for,
    writer,
)


@pytest.fixture
def store() -> Generator[KvStore]:
    with KvStore.create(room_for(8)) as made:
        yield made


def lose(store: KvStore, number: int) -> None:
    """Let a snapshot be found damaged, and so removed."""
    there = found_by(store, prompt(number))
    store._memory.entries.checksum[there.entry] ^= np.uint64(1)
    assert store.read(there, prompt(number)) is None


def refuse_memory(store: KvStore) -> None:
    """Let every further request for memory fail; what there is stays usable."""
    with Path("/dev/null").open() as null:
        os.dup2(null.fileno(), store.fileno())


# What is found


@pytest.mark.parametrize("size", [1, 63, 64, PAGE, 5 * PAGE + 3])
def test_what_was_put_is_read_back(store: KvStore, size: int) -> None:
    token_ids = [*prompt(1, blocks=3), 8, 9]
    assert put(store, token_ids, content(1, size))
    assert content(1, size) == read(store, token_ids)
    there = found_by(store, token_ids)
    assert (3, 50, size) == (there.blocks, there.tokens, there.size)


def test_a_copy_is_the_readers_own(store: KvStore) -> None:
    put(store, prompt(1), content(1, 100))
    copy = store.read(found_by(store, prompt(1)), prompt(1))
    assert copy is not None
    copy[:] = 0
    assert content(1, 100) == read(store, prompt(1))


def test_snapshots_of_several_sizes_keep_apart(store: KvStore) -> None:
    for number in range(4):
        assert put(store, prompt(number), content(number, PAGE + number))
    for number in range(4):
        assert content(number, PAGE + number) == read(store, prompt(number))


def test_a_longer_prompt_continues_a_shorter_snapshot(store: KvStore) -> None:
    put(store, prompt(1, blocks=2), content(1, 100))
    longer = [*prompt(1, blocks=2), *prompt(2, blocks=2)]
    assert 2 == found_by(store, longer).blocks
    assert content(1, 100) == read(store, longer)


def test_a_shared_system_prompt_is_found_whatever_follows_it(store: KvStore) -> None:
    put(store, [*prompt(1, blocks=3), *prompt(2)], content(1, 100))
    other = [*prompt(1, blocks=3), *prompt(3)]
    assert (3, 64) == (found_by(store, other).blocks, found_by(store, other).tokens)
    assert content(1, 100) == read(store, other)


def test_what_shares_no_whole_block_is_not_found(store: KvStore) -> None:
    put(store, prompt(1), content(1, 100))
    assert find(store, [*prompt(1)[:-1], 2]) is None
    assert find(store, prompt(1)[:-1]) is None


def test_of_equal_matches_the_smallest_is_found(store: KvStore) -> None:
    """It is the cheapest to restore."""
    for number, size in ((1, 300), (2, 200), (3, 250)):
        put(store, [*prompt(9), *prompt(number)], content(number, size))
    assert content(2, 200) == read(store, prompt(9))


block_lists = st.lists(st.integers(0, 1), max_size=6)


@settings(deadline=None)
@given(stored=st.lists(block_lists, max_size=6), asked=block_lists, whole=st.booleans())
def test_the_snapshot_that_shares_most_is_found(
    stored: list[list[int]], asked: list[int], *, whole: bool
) -> None:
    """Each number stands for a block of tokens."""
    asked_ids = [token for block in asked for token in prompt(block)]
    best = 0
    with KvStore.create(room_for(8)) as store:
        for number, blocks in enumerate(stored):
            token_ids = [token for block in blocks for token in prompt(block)]
            put(store, token_ids, content(number, 1))
            pairs = zip_longest(blocks, asked)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            best = max(best, same if same == len(blocks) or not whole else 0)
        there = find(store, asked_ids, whole=whole)
    assert best == (there.blocks if there else 0)
    assert not (whole and there) or best * BLOCK_TOKENS == there.tokens


def test_a_state_that_cannot_be_cut_back_must_end_with_the_match(store: KvStore) -> None:
    put(store, prompt(1, blocks=2), content(1, 100))
    put(store, [*prompt(1, blocks=3), 5], content(2, 100))
    put(store, prompt(1, blocks=5), content(3, 100))
    there = found_by(store, prompt(1, blocks=4), whole=True)
    assert (2, 32) == (there.blocks, there.tokens)


def test_models_do_not_find_each_others_snapshots(store: KvStore) -> None:
    """Nothing in a snapshot tells which weights made it."""
    for namespace in (0, 2**64 - 1):
        assert put(store, prompt(1), content(namespace % 5, 100), namespace)
    assert content(0, 100) == read(store, prompt(1), 0)
    assert content((2**64 - 1) % 5, 100) == read(store, prompt(1), 2**64 - 1)
    assert find(store, prompt(1), 5) is None


def test_equal_hashes_alone_prove_nothing(store: KvStore) -> None:
    liar = prompt(1, blocks=2)
    liar[BLOCK_TOKENS] = 99
    store.put(NAMESPACE, liar, names(prompt(1, blocks=2)), 100, writer(content(1, 100)))
    there = found_by(store, prompt(1, blocks=2))
    assert store.read(there, prompt(1, blocks=2)) is None
    copy = store.read(there, liar)
    assert copy is not None
    assert content(1, 100) == bytes(copy)


def test_a_snapshot_begins_on_a_cache_line(store: KvStore) -> None:
    def write(view: memoryview) -> int:
        assert 0 == np.frombuffer(view, np.uint8).ctypes.data % 64
        return len(view)

    for tokens in (BLOCK_TOKENS, BLOCK_TOKENS + 1):
        token_ids = [tokens] * tokens
        assert store.put(NAMESPACE, token_ids, names(token_ids), 100, write)


# What is not stored


def test_a_prompt_without_a_whole_block_is_not_stored(store: KvStore) -> None:
    assert not put(store, prompt(1)[:-1], content(1, 100))
    assert 0 == store.stats().snapshots


def test_a_snapshot_is_stored_once(store: KvStore) -> None:
    assert put(store, prompt(1), content(1, 100))
    assert not put(store, prompt(1), content(2, 100))
    assert content(1, 100) == read(store, prompt(1))
    assert 1 == store.stats().snapshots


def test_a_snapshot_is_written_by_one_at_a_time(store: KvStore) -> None:
    """Eight replicas that computed the same prefix at once keep one copy of it."""
    with KvStore.attach(os.dup(store.fileno())) as other:

        def write(view: memoryview) -> int:
            assert not put(other, prompt(1), content(2, 100))
            view[:] = content(1, 100)
            return 100

        assert store.put(NAMESPACE, prompt(1), names(prompt(1)), 100, write)
    assert content(1, 100) == read(store, prompt(1))


def test_a_snapshot_of_another_size_than_announced_is_not_kept(store: KvStore) -> None:
    def write(view: memoryview) -> int:
        return len(view) - 1

    before = store.stats()
    assert not store.put(NAMESPACE, prompt(1), names(prompt(1)), 100, write)
    assert (None, before) == (find(store, prompt(1)), store.stats())


def test_a_failing_writer_leaves_nothing_behind(store: KvStore) -> None:
    def write(_: memoryview) -> int:
        raise BrokenPipeError

    before = store.stats()
    with pytest.raises(BrokenPipeError):
        store.put(NAMESPACE, prompt(1), names(prompt(1)), 100, write)
    assert (None, before) == (find(store, prompt(1)), store.stats())


def test_a_snapshot_is_found_only_when_it_is_complete(store: KvStore) -> None:
    def write(view: memoryview) -> int:
        assert find(store, prompt(1)) is None
        return len(view)

    assert store.put(NAMESPACE, prompt(1), names(prompt(1)), 100, write)
    assert find(store, prompt(1))


def test_what_cannot_fit_evicts_nothing(store: KvStore) -> None:
    put_pages(store, 1, 8)
    assert not put_pages(store, 2, 9)
    assert [1] == held(store, 1, 2)
    assert 0 == store.stats().evictions


def test_where_there_is_no_memory_nothing_is_stored(store: KvStore) -> None:
    """A tmpfs may be smaller than the budget: to touch what it refuses would kill the process."""
    refuse_memory(store)
    before = store.stats()
    assert not put_pages(store, 1, 1)
    assert before == store.stats()


def test_memory_that_is_there_is_not_asked_for_again(store: KvStore) -> None:
    put_pages(store, 1, 4)
    put_pages(store, 2, 4)
    refuse_memory(store)
    assert put_pages(store, 3, 4)
    assert put_pages(store, 4, 8)


def test_room_that_has_memory_is_used_first(store: KvStore) -> None:
    for number in (1, 2):
        put_pages(store, number, 2)
    lose(store, 1)
    refuse_memory(store)
    assert put_pages(store, 3, 2)


def test_memory_is_asked_for_page_by_page(store: KvStore) -> None:
    put_pages(store, 1, 2)
    put_pages(store, 2, 1)
    lose(store, 2)
    refuse_memory(store)
    assert not put_pages(store, 3, 2)
    assert put_pages(store, 4, 1)
    assert not put_pages(store, 5, 1)


def test_memory_in_front_of_somebody_elses_is_not_taken_for_granted(store: KvStore) -> None:
    with KvStore.attach(os.dup(store.fileno())) as other:

        def write(_: memoryview) -> int:
            assert put_pages(other, 2, 4)
            return 0

        store.put(NAMESPACE, prompt(1), names(prompt(1)), page_sized(4), write)
    refuse_memory(store)
    assert not put_pages(store, 3, 4)


# What goes


def test_a_snapshot_that_was_read_outlives_one_that_was_not(store: KvStore) -> None:
    put_pages(store, 1, 4)
    put_pages(store, 2, 4)
    read(store, prompt(1))
    put_pages(store, 3, 4)
    assert [1, 3] == held(store, 1, 2, 3)
    assert 1 == store.stats().evictions


def test_a_snapshot_that_was_put_again_counts_as_used(store: KvStore) -> None:
    put_pages(store, 1, 4)
    put_pages(store, 2, 4)
    put_pages(store, 1, 4)
    put_pages(store, 3, 4)
    assert [1, 3] == held(store, 1, 2, 3)


def test_nothing_goes_while_a_hole_is_large_enough(store: KvStore) -> None:
    for number in (1, 2, 3, 4):
        put_pages(store, number, 2)
    put_pages(store, 5, 1)
    put_pages(store, 6, 1)
    assert [2, 3, 4, 5, 6] == held(store, 1, 2, 3, 4, 5, 6)
    assert 1 == store.stats().evictions


def test_a_full_table_gives_up_the_oldest_snapshot() -> None:
    with KvStore.create(room_for(ENTRIES_MAX + 1)) as store:
        for number in range(ENTRIES_MAX):
            assert put(store, prompt(number), b"x")
        read(store, prompt(0))
        assert put(store, prompt(ENTRIES_MAX), b"x")
        assert [0, 2, ENTRIES_MAX] == held(store, 0, 1, 2, ENTRIES_MAX)
        assert (ENTRIES_MAX, 1) == (store.stats().snapshots, store.stats().evictions)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_snapshots_of_one_size_leave_in_the_order_of_their_use(
    steps: list[tuple[bool, int]],
) -> None:
    """Compared with a cache that has three places."""
    model: OrderedDict[int, None] = OrderedDict()
    with KvStore.create(room_for(7)) as store:
        for is_put, number in steps:
            if is_put:
                assert put_pages(store, number, 2) is (number not in model)
                model[number] = None
            else:
                assert (read(store, prompt(number)) is not None) is (number in model)
            if number in model:
                model.move_to_end(number)
            if len(model) > 3:
                model.popitem(last=False)
            assert sorted(model) == held(store, *range(6))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=30))
def test_the_budget_is_never_exceeded(steps: list[tuple[int, int]]) -> None:
    """Every prompt has one size; what is held is what was put, and adds up."""
    sizes: dict[int, int] = {}
    with KvStore.create(room_for(8) + 5) as store:
        for number, pages in steps:
            sizes.setdefault(number, pages)
            before = held(store, *range(10))
            stored = put_pages(store, number, sizes[number])
            there = held(store, *range(10))
            assert stored is (sizes[number] <= 8 and number not in before)
            assert set(there) <= {*before, number}
            assert (number in there) is (sizes[number] <= 8)
            stats = store.stats()
            assert sum(sizes[n] * PAGE for n in there) == stats.bytes_used - ARENA_AT
            assert stats.bytes_used <= stats.budget_bytes <= room_for(8) + 5
            for n in there:
                assert content(n, page_sized(sizes[n])) == read(store, prompt(n))
