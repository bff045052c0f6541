"""Guesses from the text itself, and how far they are trusted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.lookup import DRAFT_MAX, NGRAM, TRUST_FIRST, Lookup, Trust


def test_a_run_seen_before_goes_on_as_it_did() -> None:
    assert [4, 5] == Lookup().draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 2)


def test_the_latest_occurrence_counts() -> None:
    assert [7] == Lookup().draft([1, 2, 3, 4, 1, 2, 3, 7, 1, 2, 3], 1)


def test_what_was_never_seen_is_not_guessed() -> None:
    assert [] == Lookup().draft([1, 2, 3, 4, 5, 6], 4)
    assert [] == Lookup().draft([1], 4)


def test_a_text_that_repeats_itself_is_guessed_across_its_end() -> None:
    """Only what is there can be guessed: the guess ends with the text."""
    assert [1, 2, 3] == Lookup().draft([1, 2, 3, 1, 2, 3], 7)


@given(st.lists(st.integers(0, 2), max_size=40), st.data())
def test_growing_with_the_text_changes_nothing(text: list[int], data: st.DataObject) -> None:
    """Tokens are indexed as they come; guesses are those of a lookup that sees all at once."""
    lookup = Lookup()
    for end in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
        assert Lookup().draft(text[:end], 4) == lookup.draft(text[:end], 4)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_a_guess_follows_an_earlier_occurrence_of_the_last_run(text: list[int]) -> None:
    guess = Lookup().draft(text, DRAFT_MAX)
    run = text[-NGRAM:]
    places = [i for i in range(len(text) - NGRAM) if text[i : i + NGRAM] == run]

    assert bool(guess) == bool(places)
    if places:
        after = places[-1] + NGRAM
        assert guess == text[after : after + DRAFT_MAX]


def test_a_new_text_is_hardly_trusted() -> None:
    assert 0 == Trust().length(lambda rows: 1.0 + 0.7 * (rows - 1), DRAFT_MAX)


def test_right_guesses_make_drafts_longer_and_wrong_ones_end_them() -> None:
    trust = Trust()
    for _ in range(60):
        trust.observe(1, 1)
    assert DRAFT_MAX == trust.length(lambda _rows: 1.0, DRAFT_MAX)
    for _ in range(60):
        trust.observe(1, 0)

    assert 0 == trust.length(lambda rows: 1.0 + 0.7 * (rows - 1), DRAFT_MAX)


def test_rows_that_cost_as_much_as_steps_are_never_worth_it() -> None:
    trust = Trust()
    for _ in range(60):
        trust.observe(3, 3)

    assert 0 == trust.length(float, DRAFT_MAX)


def test_only_what_was_checked_is_learned_from() -> None:
    """Behind the first wrong guess nothing is known."""
    trust = Trust()
    trust.observe(5, 0)

    assert pytest.approx(TRUST_FIRST * 0.9) == trust.right
