"""Talks to a running OpenAI-compatible server, so that the whole way can be put to the exam.

Writes a reply's tool calls back as the text the model made, because that is what rules judge.
"""

from random import Random
from typing import Any

import httpx

from replica.demo.conversation import Conversation, Message, to_json
from replica.demo.talker import ANSWER_TOKENS_MAX, Reply

TIMEOUT_S = 300.0


class Remote:
    """A server that is asked for one answer at a time."""

    def __init__(self, url: str, client: httpx.Client | None = None) -> None:
        self._url = url.rstrip("/")
        self._client = client or httpx.Client(timeout=TIMEOUT_S)

    def reply(self, conversation: Conversation, temperature: float, random: Random) -> Reply:
        """Ask for the answer to a conversation that ends with a user's or a tool's message."""
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [_message(message) for message in conversation.messages],
            "temperature": temperature,
            "max_tokens": ANSWER_TOKENS_MAX,
            "seed": random.randrange(2**31),
        }
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        response = self._client.post(f"{self._url}/chat/completions", json=body)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        return Reply(_text(choice["message"]), stopped=choice["finish_reason"] != "length")


def _message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": to_json(call.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        made["tool_call_id"] = "call_0"
    return made


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    text: str = message.get("content") or ""
    for call in calls:
        name, arguments = to_json(call["function"]["name"]), call["function"]["arguments"]
        body = f'{{"name": {name}, "arguments": {arguments}}}'
        text += f"\n<tool_call>\n{body}\n</tool_call>"
    return text
