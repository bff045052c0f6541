"""Tool calls are found in the text however it is cut, and what is none stays content."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.tools import HermesParser, ToolCall

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
FIND = ("find", '{"q": "é"}')


def parse(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    numbers = itertools.count()
    parser = HermesParser(lambda: f"call_{next(numbers)}")
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.content for part in parts), [call for part in parts for call in part.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("text ends in space \n", "text ends in space \n", []),
        ("a < b and <tool", "a < b and <tool", []),
        (CALL, "", [FIND]),
        (f"\n{CALL}\n{CALL}\n", "", [FIND, FIND]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [FIND]),
        (f"{CALL}\nDone.", "\nDone.", [FIND]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\":1}"}</tool_call>',
            "",
            [("f", '{"a":1}')],
        ),
        ('<tool_call>{"name": "now"}', "", [("now", "{}")]),
        ('<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
        ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            [],
        ),
        ("<tool_call>" + "[" * 9000, "<tool_call>" + "[" * 9000, []),
        (f"<tool_call>bad</tool_call>{CALL}", "<tool_call>bad</tool_call>", [FIND]),
    ],
)
def test_text_is_divided_into_content_and_calls(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        found_content, found = parse(pieces)
        assert content == found_content
        assert calls == [(call.name, call.arguments) for call in found]
        assert [(i, f"call_{i}") for i in range(len(calls))] == [
            (call.index, call.call_id) for call in found
        ]


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>x</tool_call>", "text", " ", "\n", "<tool_", "<"])),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_the_result_does_not_depend_on_how_the_text_was_cut(
    parts: list[str], borders: list[int]
) -> None:
    text = "".join(parts)
    ends = sorted(border % (len(text) + 1) for border in borders)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse([text]) == parse(pieces)


def test_content_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    parser = HermesParser(lambda: "id")
    shown = [parser.push(text).content for text in ("one ", "two <", "b> three", "\n<tool_call>")]
    assert shown == ["one", " two", " <b> three", ""]
