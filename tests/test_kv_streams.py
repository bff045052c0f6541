"""The books on the KV cache, compared with the tokens themselves and never with other books."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.blocks import block_hashes
from replica.kv_streams import COPY_TOKENS, KvStreams, Lease
from replica.wire import Evicted, KvEvent, Stored

BLOCK = 2
ROOT = 5


def streams(parallel: int, *, trimmable: bool = True) -> KvStreams:
    return KvStreams(parallel, BLOCK, ROOT, trimmable=trimmable)


def names(*prompts: list[int]) -> list[int]:
    """The names a cache with these contents must hold."""
    return sorted({name for prompt in prompts for name in block_hashes(prompt, BLOCK, ROOT)})


def hold(kv: KvStreams, token_ids: list[int]) -> int:
    """Compute a prompt as the scheduler would, leave it in the cache; return its stream."""
    lease = kv.acquire(token_ids)
    assert lease is not None
    kv.append(lease.stream_id, token_ids[lease.cached_tokens :])
    kv.release(lease.stream_id)
    return lease.stream_id


def acquired(kv: KvStreams, token_ids: list[int]) -> Lease:
    lease = kv.acquire(token_ids)
    assert lease is not None
    return lease


# What is reused


def test_the_stream_that_saves_most_is_taken() -> None:
    kv = streams(3)
    held = ([1, 2, 8, 8], [9, 9, 9], [1, 2, 3, 4])
    leases = [acquired(kv, prompt) for prompt in held]
    for lease, prompt in zip(leases, held, strict=True):
        kv.append(lease.stream_id, prompt)
        kv.release(lease.stream_id)
    assert Lease(2, 3) == acquired(kv, [1, 2, 3, 5])


def test_the_last_prompt_token_is_always_computed() -> None:
    """Its logits choose the first token of the answer."""
    kv = streams(1)
    hold(kv, [1, 2, 3])
    assert Lease(0, 2) == acquired(kv, [1, 2, 3])
    assert [1, 2] == kv.tokens_of(0)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.data())
def test_exactly_the_common_prefix_is_reused(held: list[int], data: st.DataObject) -> None:
    same = data.draw(st.integers(0, len(held)))
    rest = data.draw(st.lists(st.integers(2, 3), min_size=1, max_size=10))
    kv = streams(1)
    hold(kv, held)
    assert Lease(0, same) == acquired(kv, held[:same] + rest)
    assert held[:same] == kv.tokens_of(0)


def test_the_oldest_free_stream_is_the_one_reused() -> None:
    kv = streams(3)
    for prompt in ([1, 1], [2, 2], [3, 3]):
        hold(kv, prompt)
    assert 0 == hold(kv, [1, 1]), "used again, and as long as the others: only its age differs"
    assert [1, 2, 0] == [acquired(kv, [7]).stream_id for _ in range(3)]


def test_among_fresh_streams_the_lowest_id_is_taken() -> None:
    """llama.cpp batches streams together only while their ids ascend without a gap."""
    kv = streams(4)
    assert [0, 1, 2, 3] == [acquired(kv, [7]).stream_id for _ in range(4)]


def test_a_short_match_does_not_destroy_a_long_conversation() -> None:
    """What is overwritten has a price: two shared tokens are no reason while a stream is empty."""
    kv = streams(2)
    hold(kv, [1, 2, *range(10, 60)])
    assert Lease(1, 0) == acquired(kv, [1, 2, 99])


def test_a_match_worth_more_than_what_it_destroys_is_taken() -> None:
    kv = streams(2)
    hold(kv, [*range(20), *range(100, 200)])
    lease = acquired(kv, [*range(20), 99])

    assert (0, 20) == (lease.stream_id, lease.cached_tokens)
    assert lease.lost is not None
    assert [*range(20), *range(100, 200)] == lease.lost[0], "to be saved first"


def test_nothing_is_leased_twice() -> None:
    kv = streams(2)
    assert {0, 1} == {acquired(kv, [1, 2]).stream_id, acquired(kv, [1, 2]).stream_id}
    assert kv.acquire([1, 2]) is None
    assert 0 == kv.free
    kv.release(1)
    assert 1 == kv.free
    assert Lease(1, 0) == acquired(kv, [1, 2])


def test_a_stream_in_use_is_no_cache() -> None:
    kv = streams(2)
    kv.append(acquired(kv, [1, 2, 3]).stream_id, [1, 2, 3])
    assert Lease(1, 0) == acquired(kv, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("prompt", "cached"), [([1, 2, 3, 4], 3), ([1, 2, 3], 0), ([1, 2], 0), ([1, 2, 9, 9], 0)]
)
def test_a_state_that_cannot_be_cut_back_is_continued_only_from_its_end(
    prompt: list[int], cached: int
) -> None:
    kv = streams(1, trimmable=False)
    hold(kv, [1, 2, 3])
    assert Lease(0, cached) == acquired(kv, prompt)
    assert prompt[:cached] == kv.tokens_of(0)


def test_a_prefix_in_use_elsewhere_is_copied() -> None:
    kv = streams(2)
    kv.append(acquired(kv, [*range(30)]).stream_id, [*range(30)])
    assert Lease(1, 25, copied_from=0) == acquired(kv, [*range(25), 99])
    assert [*range(25)] == kv.tokens_of(1)
    assert [*range(30)] == kv.tokens_of(0)


def test_a_copy_outlives_its_source() -> None:
    kv = streams(2)
    hold(kv, [*range(30)])
    busy = acquired(kv, [*range(30)])
    assert 1 == acquired(kv, [*range(25), 99]).stream_id
    kv.release(busy.stream_id)
    acquired(kv, [77])
    assert names([*range(25)]) == kv.held_blocks()


def test_a_prefix_too_short_to_be_worth_a_copy_is_computed() -> None:
    kv = streams(2)
    kv.append(acquired(kv, [*range(30)]).stream_id, [*range(30)])
    assert Lease(1, 0) == acquired(kv, [*range(COPY_TOKENS - 1), 99])


def test_a_copy_goes_where_it_destroys_least() -> None:
    kv = streams(3)
    busy = acquired(kv, [*range(100)]).stream_id
    kv.append(busy, [*range(100)])
    assert 1 == hold(kv, [*range(200, 260)])
    assert 2 == hold(kv, [300])
    assert Lease(2, 99, copied_from=0) == acquired(kv, [*range(100)])


def test_a_state_that_cannot_be_cut_back_is_copied_only_whole() -> None:
    kv = streams(2, trimmable=False)
    kv.append(acquired(kv, [*range(30)]).stream_id, [*range(30)])
    assert Lease(1, 0) == acquired(kv, [*range(29), 99])
    kv.release(1)
    assert Lease(1, 30, copied_from=0) == acquired(kv, [*range(30), 99])


def test_streams_with_a_window_are_not_copied() -> None:
    """What lies outside the window at the source's end is missing in a copy, which is then cut."""
    kv = KvStreams(2, BLOCK, ROOT, trimmable=True, copies_prefixes=False)
    kv.append(acquired(kv, [*range(30)]).stream_id, [*range(30)])
    assert Lease(1, 0) == acquired(kv, [*range(30), 99])
    kv.release(0)
    assert Lease(0, 20) == acquired(kv, [*range(20), 99]), "but cut back they are"


# What is said of it


def test_names_appear_when_their_block_is_full_and_go_when_it_is_cut() -> None:
    kv = streams(1)
    stream_id = acquired(kv, [1, 2, 3, 4, 5]).stream_id
    kv.append(stream_id, [1])
    assert [] == kv.take_events()
    kv.append(stream_id, [2, 3, 4])
    one, two = block_hashes([1, 2, 3, 4], BLOCK, ROOT)
    assert [Stored([one, two])] == kv.take_events()
    kv.append(stream_id, [5])
    kv.release(stream_id)
    acquired(kv, [1, 2, 3, 9])
    assert [Evicted([two])] == kv.take_events()
    assert [] == kv.take_events()


def test_a_cut_inside_a_block_takes_its_name_away() -> None:
    kv = streams(1)
    hold(kv, [1, 2, 3, 4])
    acquired(kv, [1, 2, 3, 9])
    assert names([1, 2]) == kv.held_blocks()


def test_a_name_held_twice_is_told_once_and_goes_with_the_last_holder() -> None:
    kv = streams(2)
    first, second = acquired(kv, [1, 2, 3]), acquired(kv, [1, 2, 3])
    kv.append(first.stream_id, [1, 2])
    kv.append(second.stream_id, [1, 2])
    assert [Stored(names([1, 2]))] == kv.take_events()
    for lease in (first, second):
        kv.release(lease.stream_id)
    acquired(kv, [8])
    assert [] == kv.take_events()
    acquired(kv, [9])
    assert [Evicted(names([1, 2]))] == kv.take_events()
    assert [] == kv.held_blocks()


def test_the_state_shows_in_the_repr() -> None:
    kv = streams(2)
    kv.append(acquired(kv, [1, 2]).stream_id, [1, 2])
    assert "<KvStreams 1/2 leased, 2 tokens>" == repr(kv)


prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(1, 30).map(lambda count: [0] * count),
)


@given(st.integers(1, 3), st.booleans(), st.data())
def test_events_names_and_tokens_agree_whatever_happens(
    parallel: int,
    trimmable: bool,  # noqa: FBT001 - drawn by hypothesis
    data: st.DataObject,
) -> None:
    """Who follows the events knows the cache, and the cache is what the streams hold."""
    kv = streams(parallel, trimmable=trimmable)
    cells: dict[int, list[int]] = {stream_id: [] for stream_id in range(parallel)}
    leased: set[int] = set()
    mirror: set[int] = set()
    for prompt in data.draw(st.lists(prompts, max_size=12)):
        lease = kv.acquire(prompt)
        assert (lease is None) == (len(leased) == parallel)
        if lease is not None:
            leased.add(lease.stream_id)
            if lease.copied_from is not None:
                cells[lease.stream_id] = list(cells[lease.copied_from])
            assert trimmable or lease.cached_tokens in (0, len(cells[lease.stream_id]))
            del cells[lease.stream_id][lease.cached_tokens :]
            assert prompt[: lease.cached_tokens] == cells[lease.stream_id]
            computed = data.draw(st.integers(lease.cached_tokens, len(prompt)))
            kv.append(lease.stream_id, prompt[lease.cached_tokens : computed])
            cells[lease.stream_id] += prompt[lease.cached_tokens : computed]
        for stream_id in data.draw(st.sets(st.sampled_from(sorted(leased)))) if leased else ():
            kv.release(stream_id)
            leased.remove(stream_id)
        follow(mirror, kv.take_events())

        assert names(*cells.values()) == kv.held_blocks() == sorted(mirror)
        assert cells == {stream_id: kv.tokens_of(stream_id) for stream_id in cells}
        assert sum(map(len, cells.values())) == kv.used_tokens
        assert parallel - len(leased) == kv.free


def follow(mirror: set[int], events: list[KvEvent]) -> None:
    """Keep a mirror as the gateway does, and refuse news that is none."""
    for event in events:
        match event:
            case Stored(blocks):
                assert mirror.isdisjoint(blocks)
                assert len(blocks) == len(set(blocks)) > 0
                mirror.update(blocks)
            case Evicted(blocks):
                assert mirror.issuperset(blocks)
                assert len(blocks) == len(set(blocks)) > 0
                mirror.difference_update(blocks)
