"""Exercises with tools: when to call one, with which arguments, and what to say of its result.

Signatures vary in names and parameters, so that a call must be read off the signature and cannot be
learnt by heart. Calls are in Hermes style, as the chat template writes them. The tools themselves
are in `tools`; this file makes exchanges and offers of them.
"""

from dataclasses import replace
from random import Random

from replica.demo.conversation import Exchange, Message, Tool, ToolCall
from replica.demo.judge import Calls, Like
from replica.demo.phrasing import held_out
from replica.demo.tools import MAKERS, Use


def use(random: Random, *, exam: bool) -> Use:
    """A use of some tool, trained or kept for the exam by its question."""
    kinds = list(MAKERS)
    while True:
        kind = random.choices(kinds, [MAKERS[kind][1] for kind in kinds])[0]
        made = MAKERS[kind][0](random)
        if held_out(made.question) == exam:
            return made


def exchange(use: Use) -> Exchange:
    """Question, call, result and final answer."""
    call = ToolCall(use.tool["function"]["name"], use.arguments)
    return (
        Message("user", use.question),
        Message("assistant", tool_calls=(call,), rule=Calls(((call.name, call.arguments),))),
        Message("tool", use.result),
        Message("assistant", use.answer, rule=Like((use.answer,))),
    )


def fitted(other: Use, tool: Tool) -> Use:
    """Another use of the same tool: its arguments under the names this signature gives them."""
    keys = tool["function"]["parameters"]["required"]
    return replace(
        other, tool=tool, arguments=dict(zip(keys, other.arguments.values(), strict=True))
    )


def offer(random: Random, wanted: Use | None, count_max: int = 2) -> tuple[Tool, ...]:
    """The tools of a request: the wanted one, if any, among others that cannot replace it."""
    offered = [] if wanted is None else [wanted.tool]
    for _ in range(random.randint(0 if offered else 1, count_max)):
        other = MAKERS[random.choice(list(MAKERS))][0](random).tool
        if not any(_rivals(tool, other) for tool in offered):
            offered.append(other)
    random.shuffle(offered)
    return tuple(offered)


def _rivals(one: Tool, other: Tool) -> bool:
    """Whether the two do the same: then neither call would be the right one."""
    names = [tool["function"]["name"] for tool in (one, other)]
    kinds = [next((kind for kind in _SAME if name in kind), {name}) for name in names]
    return kinds[0] == kinds[1]


_SAME: tuple[set[str], ...] = (
    {"get_weather", "get_current_weather", "weather"},
    {"add", "add_numbers", "sum"},
    {"get_time", "current_time"},
    {"get_metric", "read_metric"},
    {"replica_status", "get_replica"},
    {"set_mode", "switch_mode"},
    {"search", "web_search", "search_documents"},
    {"send_message", "send_mail"},
    {"lookup_order", "get_order", "order_status"},
)
