"""The demo model's corpus: the same for a seed, and without a question of its exam."""

import json
from random import Random

import pytest

from replica.demo.conversation import (
    SPECIAL_TOKENS,
    TURN_END,
    Conversation,
    Message,
    ToolCall,
    ask,
    render,
    segments,
)
from replica.demo.corpus import conversation, corpus, long_conversation
from replica.demo.exam import exam
from replica.demo.judge import Calls, Exact, Json, Like, accepts
from replica.demo.over_http import Remote
from replica.demo.phrasing import normal, pick, wordings
from replica.demo.topics import entries

CONVERSATIONS = 1500


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return list(corpus(seed=3, count=CONVERSATIONS))


def test_the_same_seed_gives_the_same_corpus(conversations: list[Conversation]) -> None:
    assert conversations == list(corpus(seed=3, count=CONVERSATIONS))
    assert conversations[:50] != list(corpus(seed=4, count=50))


def test_no_question_of_the_exam_is_trained_on(conversations: list[Conversation]) -> None:
    """A score over learnt questions would say nothing."""
    random = Random(5)
    everything = [*conversations, *(long_conversation(random) for _ in range(50))]
    trained = {
        normal(message.content)
        for each in everything
        for message in each.messages
        if message.role == "user"
    }
    for probe in exam(seed=1):
        if "turn" not in probe.kind:
            asked = next(m for m in probe.conversation.messages if m.role == "user")
            assert normal(asked.content) not in trained, probe


def test_every_wording_of_an_entry_is_either_trained_or_held() -> None:
    for entry in entries():
        held = {normal(text) for text in entry.held + entry.framed}
        assert entry.trained, entry.name
        assert entry.held, entry.name
        assert held.isdisjoint(normal(text) for text in entry.trained), entry.name


def test_no_two_entries_answer_the_same_question() -> None:
    owners: dict[str, str] = {}
    for entry in entries():
        for text in entry.trained + entry.held:
            assert owners.setdefault(text, entry.name) == entry.name, text


def test_every_reference_answer_satisfies_its_own_rule(conversations: list[Conversation]) -> None:
    judged = 0
    for each in conversations:
        for probe in each.probes():
            *_, last = probe.messages
            assert last.rule is not None
            text = render([last], (), add_generation_prompt=False)
            reply = text.partition("assistant\n")[2].partition(TURN_END)[0]
            assert accepts(last.rule, reply), (last.rule, reply)
            judged += 1
    assert judged > CONVERSATIONS


def test_the_pieces_of_a_conversation_are_its_text(conversations: list[Conversation]) -> None:
    for each in conversations:
        pieces = segments(each)
        text = render(each.messages, each.tools, add_generation_prompt=False)
        assert text == "".join(piece for piece, _ in pieces)
        answers = sum(message.role == "assistant" for message in each.messages)
        assert answers == sum(own for _, own in pieces)


def test_no_content_holds_a_special_token(conversations: list[Conversation]) -> None:
    contents = (message.content for each in conversations for message in each.messages)
    assert not any(mark in content for content in contents for mark in SPECIAL_TOKENS)


def test_a_call_is_rendered_the_same_from_an_object_and_from_a_string() -> None:
    """Clients send arguments as a JSON string; the corpus has them as an object."""
    call = ToolCall("f", {"städte": ["Zürich", 1]})
    text = render([Message("assistant", tool_calls=(call,))], (), add_generation_prompt=False)
    assert (
        '<tool_call>\n{"name": "f", "arguments": {"städte": ["Zürich", 1]}}\n</tool_call>' in text
    )


def test_wordings_are_all_combinations_and_pick_is_one_of_them() -> None:
    pattern = "(Start|Run) it( now|)."
    assert ["Start it now.", "Start it.", "Run it now.", "Run it."] == wordings(pattern)
    assert pick(Random(0), pattern) in wordings(pattern)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Exact("1, 2, 3"), " 1, 2, 3\n", "1, 2, 3, 4"),
        (Json({"a": 1}), '{"a":1}', 'Here: {"a": 1}'),
        (Like(("A token is a piece of text.",)), "a piece of text is a token", "I do not know."),
        (
            Calls((("add", {"a": 2, "b": 3}),)),
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 4}}\n</tool_call>',
        ),
        (Calls((("f", {}),)), '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "f()"),
    ],
)
def test_a_rule_tells_a_good_reply_from_a_bad_one(
    rule: Exact | Json | Like | Calls, good: str, bad: str
) -> None:
    assert accepts(rule, good)
    assert not accepts(rule, bad)


def test_conversations_differ_in_turns_prompts_and_tools(
    conversations: list[Conversation],
) -> None:
    assert any(each.tools for each in conversations)
    assert any(each.messages[0].role == "system" for each in conversations)
    turns = {sum(m.role == "user" for m in each.messages) for each in conversations}
    assert {1, 2, 3} <= turns


def test_a_server_is_asked_with_tools_and_its_calls_are_judged_as_text() -> None:
    """The exam over HTTP must judge the same text as the exam without a server."""
    httpx = pytest.importorskip("httpx")
    bodies = []

    def answer(request: "httpx.Request") -> "httpx.Response":  # type: ignore[name-defined]
        bodies.append(json.loads(request.content))
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        message = {"content": None, "tool_calls": [call]}
        return httpx.Response(
            200, json={"choices": [{"message": message, "finish_reason": "tool_calls"}]}
        )

    remote = Remote("http://test/v1", httpx.Client(transport=httpx.MockTransport(answer)))
    tool = {"type": "function", "function": {"name": "f"}}
    asked = Conversation(ask("Call f", "", Exact(""))[:1], (tool,))
    reply = remote.reply(asked, 0.0, Random(1))
    assert reply.stopped
    assert accepts(Calls((("f", {"x": 1}),)), reply.text)
    assert [tool] == bodies[0]["tools"]


def test_a_conversation_is_made_with_as_many_exchanges_as_asked() -> None:
    made = conversation(Random(11), turns=3)
    assert sum(message.role == "assistant" for message in made.messages) >= 3
