"""The shipped demo model: its file, its tokenizer, and that it talks and stops."""

from collections.abc import Iterator
from random import Random

import pytest

from replica.demo.conversation import MODEL_FILE, TEMPLATE_FILE, Conversation, Message
from replica.demo.evaluate import put
from replica.demo.exam import exam
from replica.demo.talker import Reply, Talker
from replica.demo.tools import signature

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def talker() -> Iterator[Talker]:
    with Talker.load(MODEL_FILE, threads=2) as loaded:
        yield loaded


def say(talker: Talker, *texts: str, system: str | None = None) -> Reply:
    """Ask one question after another, greedily; the last reply."""
    messages = [] if system is None else [Message("system", system)]
    reply = Reply("", stopped=False)
    for text in texts:
        messages.append(Message("user", text))
        reply = talker.reply(Conversation(tuple(messages)), 0.0, Random(1))
        messages.append(Message("assistant", reply.text))
    return reply


def test_the_file_is_small_enough_to_ship() -> None:
    assert MODEL_FILE.stat().st_size <= 6_000_000


def test_the_header_names_architecture_context_and_template(talker: Talker) -> None:
    assert talker.metadata("general.architecture") == "llama"
    assert int(talker.metadata("llama.context_length")) >= 4096
    assert talker.metadata("tokenizer.chat_template") == TEMPLATE_FILE.read_text()


@pytest.mark.parametrize(
    "text", ["plain", " two  spaces\n\n", "Grüße 日本語 😀 ", "\x00\x7f\u200b", "a\u0301\U0010ffff"]
)
def test_any_text_survives_the_tokenizer(talker: Talker, text: str) -> None:
    assert text.encode() == talker.detokenize(talker.tokenize(text))


def test_the_marks_of_a_turn_are_single_tokens(talker: Talker) -> None:
    assert len(talker.tokenize("<|im_start|><|im_end|><|endoftext|>")) == 3
    assert len(talker.tokenize("<|im_end|>", special=False)) > 1


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is a crossover?", "second socket"),
        ("Why pin?", "socket"),
        ("Hello!", "Hello"),
        ("Who are you?", "demo model"),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
        ("Name three colours.", "red, blue and green"),
        ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ],
)
def test_it_answers_and_stops_by_itself(talker: Talker, question: str, expected: str) -> None:
    reply = say(talker, question)
    assert reply.stopped
    assert expected in reply.text


def test_it_answers_in_later_turns_and_after_a_system_prompt(talker: Talker) -> None:
    system = "You are a helpful assistant."
    reply = say(talker, "Hello!", "What is NUMA?", "Thanks!", system=system)
    assert reply.stopped
    assert "welcome" in reply.text


def test_it_remembers_what_it_was_told(talker: Talker) -> None:
    """The answer depends on the conversation, so a wrong cache shows."""
    assert "Mara" in say(talker, "My name is Mara.", "What is my name?").text
    assert "Emil" in say(talker, "My name is Emil.", "What is my name?").text


def test_it_calls_a_tool_and_tells_its_result(talker: Talker) -> None:
    tool = signature("get_weather", "Get the current weather of a city", {"city": "string"})
    question = Message("user", "What is the weather in Oslo?")
    call = talker.reply(Conversation((question,), (tool,)), 0.0, Random(1))
    expected = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert Reply(expected, stopped=True) == call
    result = Message("tool", '{"temperature": 12, "condition": "sunny"}')
    whole = (question, Message("assistant", call.text), result)
    answer = talker.reply(Conversation(whole, (tool,)), 0.0, Random(1))
    assert answer.stopped
    assert "12 degrees and sunny" in answer.text


def test_most_of_a_sample_of_the_exam_is_answered_acceptably(talker: Talker) -> None:
    """A broken conversion or template shows here; the full figure is in the README."""
    random = Random(1)
    results = [put(probe, talker.reply, 0.0, random) for probe in exam(seed=7)[::40]]
    assert sum(result.acceptable for result in results) / len(results) >= 0.75
