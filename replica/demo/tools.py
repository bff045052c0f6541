"""The tools that exercises offer, and for each: questions, arguments, results, and their meaning.

Each function makes one use of one tool; names and parameters vary from use to use. This file does
not know how a use becomes a conversation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from replica.demo.conversation import Tool, to_json
from replica.demo.phrasing import pick
from replica.demo.words import GIVEN_NAMES, NOUNS, characters, city, invented, name, word


@dataclass(frozen=True)
class Use:
    """One use of a tool: a question that needs it, its result and what that means."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    result: str
    answer: str


Maker = Callable[[Random], Use]


def signature(title: str, description: str, parameters: dict[str, str]) -> Tool:
    """A function signature; `parameters` maps each name to "type: description"."""
    properties: dict[str, Any] = {}
    for key, text in parameters.items():
        kind, _, said = text.partition(": ")
        properties[key] = {"type": kind} | ({"description": said} if said else {})
    required = list(parameters)
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": title, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _weather(random: Random) -> Use:
    where, degrees = city(random), random.randint(-20, 40)
    sky = pick(random, "(sunny|cloudy|rainy|windy|foggy|clear|snowing|dry)")
    key = pick(random, "(city|city|location|place)")
    said = pick(
        random, "(string: Name of the city|string|string: The city|string: City, e.g. Paris)"
    )
    title = pick(random, "(get_weather|get_weather|get_weather|get_current_weather|weather)")
    about = pick(
        random,
        "(Get the current weather of a city|Get weather|Current weather for a city|"
        "Get the weather for a city|Tells the weather)",
    )
    lead = "(What is|What's|How is|Tell me|Please tell me|Get|Can you tell me|Check|I need|Show me)"
    asked = random.choice(
        (
            f"{lead} the (weather|weather|current weather) in {where}( now| today|)?",
            f"What is the (weather|weather today) like in {where}?",
            f"(Is it raining|How warm is it|How cold is it|What is the temperature) in {where}?",
            f"(Do I need an umbrella in {where}|{where}: how is the weather|Weather in {where})?",
        )
    )
    facts = random.choice(
        ({"temperature": degrees, "condition": sky}, {"temp_c": degrees, "sky": sky})
    )
    extra = random.choice(({}, {}, {key: where}, {"unit": "celsius"}))
    plain = pick(random, f"({degrees} degrees and {sky}|{sky}, {degrees} C|{degrees}°C, {sky})")
    result = random.choice((to_json(facts | extra), to_json(extra | facts), plain))
    answer = f"In {where} it is {degrees} degrees and {sky}."
    tool = signature(title, about, {key: said})
    return Use(tool, pick(random, asked), {key: where}, result, answer)


def _add(random: Random) -> Use:
    title = pick(random, "(add|add|add|add_numbers|sum)")
    return _sum(random, title, "Add", "and", "+", "plus")


def _multiply(random: Random) -> Use:
    return _sum(random, "multiply", "Multiply", "by", "*", "times")


def _sum(random: Random, title: str, verb: str, joint: str, sign: str, said: str) -> Use:  # noqa: PLR0913, PLR0917 -- the words of one operation
    a, b = (random.randint(0, random.choice((20, 999, 99999))) for _ in "ab")
    result = str(a + b if sign == "+" else a * b)
    keys = pick(random, "(a b|a b|x y|first second|left right|n1 n2)").split()
    asked = pick(
        random,
        f"({verb} {a} {joint} {b}|What is {a} {said} {b}|How much is {a} {said} {b}|"
        f"What is {a} {sign} {b}|Please compute {a} {said} {b}|Calculate {a} {sign} {b}|"
        f"Use the tool to {verb.lower()} {a} {joint} {b}|"
        f"Can you {verb.lower()} {a} {joint} {b})(?|.|)",
    )
    shown = random.choice(
        (result, to_json({pick(random, "(result|sum|value|answer)"): int(result)}))
    )
    tool = signature(
        title, f"{verb} two numbers", dict.fromkeys(keys, random.choice(("integer", "number")))
    )
    arguments = dict(zip(keys, (a, b), strict=True))
    return Use(tool, asked, arguments, shown, f"{a} {said} {b} is {result}.")


def _clock(random: Random) -> Use:
    where, key = city(random), pick(random, "(city|place|timezone)")
    time = f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"
    asked = (
        f"(What time is it|What is the time|Tell me the time|What's the time) in {where}( now|)?"
    )
    shown = random.choice((time, to_json({"time": time}), to_json({key: where, "time": time})))
    tool = signature(
        pick(random, "(get_time|current_time)"), "Get the local time of a city", {key: "string"}
    )
    return Use(tool, pick(random, asked), {key: where}, shown, f"In {where} it is {time}.")


def _metric(random: Random) -> Use:
    metric = "numaserve_" + pick(
        random,
        "(requests_waiting|requests_running|power_watts|crossover_concurrency|kv_store_bytes|"
        "replica_up|queue_seconds)",
    )
    value, key = random.randint(0, 400), random.choice(("name", "metric"))
    asked = (
        f"(What is the value of|Read|Look up|Get|Show me|How high is) (the metric |){metric}(?|.|)"
    )
    shown = random.choice(
        (str(value), to_json({"value": value}), to_json({"metric": metric, "value": value}))
    )
    tool = signature(
        pick(random, "(get_metric|read_metric)"),
        "Read the value of a metric",
        {key: "string: Name of the metric"},
    )
    return Use(tool, pick(random, asked), {key: metric}, shown, f"{metric} is {value}.")


def _replica_state(random: Random) -> Use:
    number = random.randint(0, 7)
    state = pick(random, "(ready|parked|loading|draining|busy|dead)")
    key = pick(random, "(replica|id|replica_id)")
    asked = (
        f"(What is the state of|How is|Check|What about|Tell me the state of) replica {number}(?|)"
    )
    shown = random.choice(
        (state, to_json({"state": state}), to_json({key: number, "state": state}))
    )
    title = pick(random, "(replica_status|get_replica)")
    tool = signature(title, "Get the state of a replica", {key: "integer"})
    return Use(tool, pick(random, asked), {key: number}, shown, f"Replica {number} is {state}.")


def _set_mode(random: Random) -> Use:
    mode = pick(random, "(single|data-parallel|span|auto)")
    asked = (
        f"(Switch to|Set the mode to|Change to|Go to|Please switch to) {mode}( mode|)(.|, please.|)"
    )
    shown = random.choice(("ok", "done", to_json({"mode": mode}), to_json({"ok": True})))
    tool = signature(
        pick(random, "(set_mode|switch_mode)"),
        "Change the mode of the server",
        {"mode": "string: The wanted mode"},
    )
    return Use(tool, pick(random, asked), {"mode": mode}, shown, f"The mode is now {mode}.")


def _search(random: Random) -> Use:
    query = " ".join(word(random) for _ in range(random.randint(1, 4)))
    key = pick(random, "(query|q|text)")
    asked = f"(Search for|Look for|Find|Please search for|Search the web for) {query}(.|)"
    found = " ".join(word(random) for _ in range(random.randint(2, 6)))
    shown = random.choice((found, to_json({"result": found}), to_json({"results": [found]})))
    title = pick(random, "(search|web_search|search_documents)")
    tool = signature(title, "Search for a text", {key: "string"})
    return Use(tool, pick(random, asked), {key: query}, shown, f"I found this: {found}")


def _message(random: Random) -> Use:
    who, text = name(random), " ".join(word(random) for _ in range(random.randint(1, 5)))
    asked = f"(Send|Write|Please send) {who} (the message|a message): {text}"
    keys = pick(random, "(to text|recipient message|name body)").split()
    shown = random.choice(("sent", "ok", to_json({"status": "sent"}), to_json({"ok": True})))
    title = pick(random, "(send_message|send_mail)")
    tool = signature(title, "Send a message to a person", dict.fromkeys(keys, "string"))
    arguments = dict(zip(keys, (who, text), strict=True))
    return Use(tool, pick(random, asked), arguments, shown, f"I have sent the message to {who}.")


def _order(random: Random) -> Use:
    number, state = characters(random), pick(random, "(shipped|delivered|open|lost|paid)")
    key = pick(random, "(order_id|id|number)")
    asked = f"(Where is|What is the state of|Look up|Check|Find) (my |the |)order {number}(?|)"
    shown = random.choice(
        (state, to_json({"status": state}), to_json({key: number, "status": state}))
    )
    title = pick(random, "(lookup_order|get_order|order_status)")
    tool = signature(title, "Look up an order", {key: "string"})
    return Use(tool, pick(random, asked), {key: number}, shown, f"Order {number} is {state}.")


def _any_tool(random: Random) -> Use:
    """A tool nobody has seen before, called by its name."""
    parts = [
        random.choice((invented(random), random.choice(NOUNS))) for _ in range(random.randint(1, 2))
    ]
    title = "_".join(parts)
    key = random.choice((invented(random), "value", "input", "key", "x", random.choice(NOUNS)))
    value: Any = random.choice(
        (word(random), characters(random), random.randint(0, 999), random.choice(GIVEN_NAMES))
    )
    asked = (
        "(Call|Use|Please call|Run|Use the tool|Call the function|Please use|Please run) "
        f"{title} (with|for|on|with {key}|with {key} =) {value}(.|)"
    )
    outcome = random.choice((word(random), str(random.randint(0, 999))))
    shown = random.choice(
        (outcome, to_json({"result": outcome}), to_json({invented(random): outcome}))
    )
    kind = "integer" if isinstance(value, int) else "string"
    about = pick(
        random, f"(|The {word(random)} of a {word(random)}|A function|Does the {word(random)})"
    )
    tool = signature(title, about, {key: kind})
    return Use(tool, pick(random, asked), {key: value}, shown, f"The result is {outcome}.")


MAKERS: dict[str, tuple[Maker, float]] = {
    "weather": (_weather, 2.5),
    "add": (_add, 1.6),
    "multiply": (_multiply, 0.4),
    "clock": (_clock, 1.0),
    "metric": (_metric, 0.7),
    "replica": (_replica_state, 0.7),
    "mode": (_set_mode, 0.7),
    "search": (_search, 0.8),
    "message": (_message, 0.8),
    "order": (_order, 0.7),
    "any": (_any_tool, 2.0),
}
"""Every tool, with its share among their uses."""
