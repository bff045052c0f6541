"""The gateway's picture of the caches: exact, or known to be lost."""

import random

import pytest

from gateway.prefix_index import PrefixIndex
from replica.wire import Evicted, KvEvent, Stored
from tests.fakes_gateway import frame, hello


def opened(*blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    index.open("a", hello(*blocks))
    return index


def test_a_connection_opens_with_the_complete_state() -> None:
    assert [1, 2] == opened(2, 1).held_blocks("a")


def test_events_change_it_in_order() -> None:
    index = opened(1)

    assert index.apply("a", frame(1, Stored([2, 3]), Evicted([1, 3])))
    assert [2] == index.held_blocks("a")
    assert index.apply("a", frame(2, Evicted([2]), Stored([2])))
    assert [2] == index.held_blocks("a")


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_wrong_number_is_a_loss(wrong: int) -> None:
    """Repeated, earlier or later: whatever was not the next frame makes the picture worthless."""
    index = opened(1)
    assert index.apply("a", frame(1))

    assert not index.apply("a", frame(wrong, Stored([2])))
    assert [] == index.held_blocks("a")


def test_after_a_loss_nothing_is_believed_before_the_next_hello() -> None:
    index = opened(1)
    assert not index.apply("a", frame(2))

    assert not index.apply("a", frame(1, Stored([1])))
    assert not index.apply("a", frame(3, Stored([1])))
    assert [] == index.held_blocks("a")
    index.open("a", hello(7))
    assert index.apply("a", frame(1, Stored([8])))
    assert [7, 8] == index.held_blocks("a")


def test_the_numbers_after_a_hello_begin_with_one() -> None:
    assert not opened().apply("a", frame(0))
    assert not opened().apply("a", frame(2))
    assert opened().apply("a", frame(1))


def test_a_restart_replaces_everything_and_counts_anew() -> None:
    """The next Hello is the whole truth: what the last life held is gone."""
    index = opened(1, 2)
    assert index.apply("a", frame(1, Stored([3])))
    index.open("a", hello(9, epoch=2))

    assert [9] == index.held_blocks("a")
    assert not index.apply("a", frame(2))


@pytest.mark.parametrize("seq", [0, 1])
def test_a_frame_without_a_hello_is_a_loss(seq: int) -> None:
    assert not PrefixIndex().apply("a", frame(seq, Stored([1])))


def test_a_forgotten_replica_holds_nothing() -> None:
    index = opened(1)
    index.forget("a")
    index.forget("never heard of")

    assert 0 == index.matched_blocks("a", [1])
    assert not index.apply("a", frame(1))


def test_a_match_is_the_leading_blocks_only() -> None:
    """A hash names everything before it: what follows a gap cannot be continued."""
    index = opened(1, 2, 4)

    assert 2 == index.matched_blocks("a", [1, 2, 3, 4])
    assert 0 == index.matched_blocks("a", [3, 1, 2])
    assert 3 == index.matched_blocks("a", [4, 2, 1])
    assert 0 == index.matched_blocks("a", [])
    assert 0 == index.matched_blocks("b", [1])


def test_replicas_do_not_mix() -> None:
    index = opened(1)
    index.open("b", hello(2))
    assert index.apply("b", frame(1, Evicted([2]), Stored([3])))
    assert not index.apply("b", frame(3))

    assert [1] == index.held_blocks("a")
    assert index.apply("a", frame(1))


@pytest.mark.parametrize("seed", range(20))
def test_without_a_loss_the_picture_is_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex()
    cache = {rng.randrange(20) for _ in range(5)}
    index.open("a", hello(*cache))
    for seq in range(1, 200):
        events: list[KvEvent] = []
        for _ in range(rng.randrange(4)):
            blocks = rng.sample(range(20), rng.randrange(1, 4))
            if rng.random() < 0.5:
                cache.update(blocks)
                events.append(Stored(blocks))
            else:
                cache.difference_update(blocks)
                events.append(Evicted(blocks))
        assert index.apply("a", frame(seq, *events))
        assert sorted(cache) == index.held_blocks("a")
