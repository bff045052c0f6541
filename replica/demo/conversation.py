"""What a conversation is, and the one text that the chat template makes of it.

Training, evaluation and the GGUF file use the same template, so the model is asked in exactly the
form it has learnt. This file knows no topic, no tokenizer and no model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from replica.demo.judge import Rule

HERE = Path(__file__).parent
MODEL_FILE = HERE / "demo.gguf"
TEMPLATE_FILE = HERE / "chat_template.jinja"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
SPECIAL_TOKENS = (TEXT_END, TURN_START, TURN_END)
ANSWER_START = f"{TURN_START}assistant\n"

Tool = dict[str, Any]
"""One function signature, as a client of the OpenAI API sends it."""


@dataclass(frozen=True)
class ToolCall:
    """A function the assistant asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message; an assistant's carries the rule by which a reply in its place is judged."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    rule: Rule | None = None


Exchange = tuple[Message, ...]
"""From a question to its final answer, perhaps with a tool's call and result between."""


@dataclass(frozen=True)
class Conversation:
    """Exchanges in their order, after an optional system prompt and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    def probes(self) -> Iterator["Conversation"]:
        """Each beginning of this conversation that ends with an answer to be judged."""
        for count, message in enumerate(self.messages, 1):
            if message.rule is not None:
                yield replace(self, messages=self.messages[:count])


def ask(question: str, answer: str, rule: Rule) -> Exchange:
    """Make the plainest exchange: one question and its answer."""
    return (Message("user", question), Message("assistant", answer, rule=rule))


def to_json(value: object) -> str:
    """Write JSON as the template writes it."""
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    return environment.from_string(TEMPLATE_FILE.read_text())


def render(
    messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
) -> str:
    """Write messages as the one text the model reads."""
    return _template().render(
        messages=[
            {
                "role": message.role,
                "content": message.content,
                "tool_calls": [
                    {"function": {"name": call.name, "arguments": call.arguments}}
                    for call in message.tool_calls
                ],
            }
            for message in messages
        ],
        tools=list(tools),
        add_generation_prompt=add_generation_prompt,
    )


def segments(conversation: Conversation) -> list[tuple[str, bool]]:
    """Cut the rendered text into pieces, each told to be the assistant's own or not."""
    text = render(conversation.messages, conversation.tools, add_generation_prompt=False)
    first, *others = text.split(ANSWER_START)
    pieces = [(first + ANSWER_START, False)]
    for number, other in enumerate(others, 1):
        answer, end, after = other.partition(TURN_END)
        assert end, "an answer must end with its mark"
        pieces.append((answer + end, True))
        pieces.append((after + ANSWER_START if number < len(others) else after, False))
    return pieces
