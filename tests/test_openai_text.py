"""Text is the same however it was cut, ends before a stop string, and holds whole characters."""

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.openai.text import StopMatcher, TextStream

ALPHABET = "ab é€😀"
STOPS = st.lists(st.text("ab é", min_size=1, max_size=4), max_size=4)


def at_once(data: bytes, stops: list[str]) -> str:
    """The text as if it had all been there from the start, without the stream's machinery."""
    text = codecs.utf_8_decode(data, "replace", False)[0]  # noqa: FBT003 - C
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def streamed(pieces: list[bytes], stops: list[str]) -> list[str]:
    stream = TextStream(stops)
    shown = []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.stopped:
            break
    return [*shown, stream.finish()]


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    ends = sorted(border % (len(data) + 1) for border in borders)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(
    st.one_of(st.binary(max_size=40), st.text(ALPHABET, max_size=40).map(str.encode)),
    st.lists(st.integers(0, 1000), max_size=20),
    STOPS,
)
def test_streamed_text_equals_the_text_at_once(
    data: bytes, borders: list[int], stops: list[str]
) -> None:
    assert at_once(data, stops) == "".join(streamed(cut(data, borders), stops))


@given(st.text(ALPHABET, max_size=40), st.lists(st.integers(0, 1000), max_size=20), STOPS)
def test_no_part_of_a_completed_stop_string_is_ever_shown(
    text: str, borders: list[int], stops: list[str]
) -> None:
    """What was shown cannot be taken back, so it must be right after every single piece."""
    final = at_once(text.encode(), stops)
    shown = ""
    for part in streamed(cut(text.encode(), borders), stops):
        shown += part
        assert final.startswith(shown)
        assert "\ufffd" not in shown, "valid input never gives a replacement character"


@given(
    st.text("ab", max_size=30),
    st.lists(st.integers(0, 1000), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=8), max_size=4),
)
@example("aabaaabaaab", [], ["aabaaabaaab", "aabaaabb"])
def test_stop_strings_may_overlap_themselves_and_each_other(
    text: str, borders: list[int], stops: list[str]
) -> None:
    assert at_once(text.encode(), stops) == "".join(streamed(cut(text.encode(), borders), stops))


def test_a_false_start_within_a_false_start_is_not_forgotten() -> None:
    assert (11, 7) == StopMatcher(["aabaaac"]).feed("aabaaabaaac")


def test_nothing_is_held_longer_than_needed() -> None:
    stream = TextStream(["END"])
    assert [stream.push(piece) for piece in (b"a", b"bE", b"N", b"x")] == ["a", "b", "", "ENx"]


def test_a_stop_string_across_token_borders_ends_the_text_before_it() -> None:
    stream = TextStream(["STOP"])
    assert [stream.push(piece) for piece in (b"hello S", b"TO", b"P and more")] == [
        "hello ",
        "",
        "",
    ]
    assert stream.stopped
    assert stream.finish() == ""


def test_held_text_is_shown_when_the_completion_ends_within_a_stop_string() -> None:
    stream = TextStream(["STOP"])
    assert stream.push(b"hello STO") == "hello "
    assert stream.shown_chars == 6
    assert stream.finish() == "STO"
    assert stream.shown_chars == stream.decoded_chars == 9


def test_the_stop_string_that_is_complete_first_wins() -> None:
    stream = TextStream(["abcd", "bc"])
    assert stream.push(b"xabcd") == "xa"


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["c", "abc"]).feed("xabc") == (4, 3)
    assert StopMatcher(["abx", "b"]).feed("ab") == (2, 1)


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "€".encode()] == ["", "", "€"]


def test_a_character_that_never_came_whole_is_dropped() -> None:
    stream = TextStream()
    assert stream.push("a€".encode()[:-1]) == "a"
    assert stream.finish() == ""


def test_invalid_bytes_become_replacement_characters() -> None:
    assert TextStream().push(b"a\xffb") == "a\ufffdb"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [([b" Hello", b" you"], "Hello you"), ([b"Hello"], "Hello"), ([b"", b" a"], "a")],
)
def test_only_the_first_space_is_skipped_and_only_when_asked(
    pieces: list[bytes], expected: str
) -> None:
    stream = TextStream(skip_leading_space=True)
    assert expected == "".join(map(stream.push, pieces))
    assert TextStream().push(b" Hello") == " Hello"
