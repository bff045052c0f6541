"""Where snapshots lie in the arena, compared with trying every place there is."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.kv_arena import ENTRY, Entries, State, longest_match
from tests.kv_children import PAGE


def test_a_match_does_not_go_on_behind_a_snapshots_own_hashes() -> None:
    words = np.array([1, 2, 3, 9, 9, 9], np.uint64)
    count, rows = longest_match(words, np.array([0, 3]), np.array([2, 3]), words[:3])
    assert (2, [0]) == (count, rows.tolist())


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_the_youngest_victim_is_as_old_as_can_be(data: st.DataObject) -> None:
    """Compared with a trial of every place, on arenas that are nearly full."""
    pages = data.draw(st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=6))
    ages = data.draw(st.permutations(range(len(pages))))
    busy = data.draw(st.sets(st.integers(0, 5), max_size=1))
    arena = sum(map(abs, pages)) + data.draw(st.sampled_from([0, 0, 1]))
    need = data.draw(st.integers(1, arena + 1))
    table = np.zeros(8, ENTRY)
    at, live = 0, {}
    for entry, (length, age) in enumerate(zip(pages, ages, strict=True)):
        if length > 0:  # a negative length is a hole
            state = State.WRITING if entry in busy else State.READY
            table[entry]["state"], table[entry]["used_at"] = state, age
            table[entry]["offset"], table[entry]["extent"] = at * PAGE, length * PAGE
            live[entry] = (range(at, at + length), age, state)
        at += abs(length)

    def victims_at(start: int) -> list[int]:
        wanted = range(start, start + need)
        return [entry for entry, (there, _, _) in live.items() if set(there) & set(wanted)]

    def youngest(victims: Sequence[int]) -> int:
        return max((live[entry][1] for entry in victims), default=-1)

    free = [
        youngest(victims_at(start))
        for start in range(arena - need + 1)
        if all(live[entry][2] == State.READY for entry in victims_at(start))
    ]
    place = Entries(table, arena * PAGE).place(need * PAGE)
    assert (place is None) is (not free)
    if place is not None:
        assert set(victims_at(place.offset // PAGE)) == set(place.victims)
        assert min(free) == youngest(place.victims)
