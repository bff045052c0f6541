"""Composes conversations out of exchanges: turns, system prompts, tools; all of it from a seed.

The same seed gives the same corpus. Run as a program, it prints some conversations to look at.
"""

from collections.abc import Iterator
from random import Random

import click
from rich.console import Console

from replica.demo import tooling
from replica.demo.conversation import Conversation, Exchange, Message, Tool, ask, render
from replica.demo.judge import Exact
from replica.demo.phrasing import chance, phrases
from replica.demo.skills import SKILLS, exercise, fact
from replica.demo.topics import entries, topic
from replica.demo.words import invented, sentence

TOPIC_SHARE = 0.5
"""Share of written questions among all exchanges without tools."""
TOOLS_SHARE = 0.3
"""Share of conversations that offer tools."""
NO_SYSTEM_SHARE = 0.5
LONG_SYSTEM_SHARE = 0.03
_RIVALS_OF_TOOLS = ("sums", "unknown")


def exchange(random: Random, *, exam: bool = False, tools: bool = False) -> Exchange:
    """One exchange that needs no tool, or could not use the tools there may be."""
    if chance(random, TOPIC_SHARE):
        return topic(random, exam=exam)
    kinds = [kind for kind in SKILLS if not (tools and kind in _RIVALS_OF_TOOLS)]
    kind = random.choices(kinds, [SKILLS[kind][1] for kind in kinds])[0]
    return exercise(random, SKILLS[kind][0], exam=exam)


def short_system(random: Random) -> str:
    """A system prompt of a sentence or two."""
    text = random.choice(phrases("systems"))
    if chance(random, 0.3):
        text += " " + random.choice(phrases("rules"))
    if chance(random, 0.1):
        text = f"You are {invented(random).capitalize()}, an assistant. " + text
    return text


def long_system(random: Random, sentences_max: int = 25) -> str:
    """A system prompt of some hundred tokens: rules, documentation, and prose of no use."""
    lines = [random.choice(phrases("systems"))]
    for _ in range(random.randint(4, sentences_max)):
        if chance(random, 0.4):
            lines.append(random.choice(phrases("rules")))
        elif chance(random, 0.5):
            lines.append(random.choice(entries()).answer)
        else:
            lines.append(sentence(random))
    return random.choice((" ", "\n", "\n- ")).join(lines)


def _system(random: Random, long_share: float) -> tuple[str | None, Exchange]:
    """A system prompt, if any, and an exchange about a fact that stands in it, seldom."""
    if chance(random, NO_SYSTEM_SHARE):
        return None, ()
    long = chance(random, long_share / (1 - NO_SYSTEM_SHARE))
    text = long_system(random) if long else short_system(random)
    if chance(random, 0.12):
        told, question, answer = fact(random)
        if not told.startswith(("My", "I am", "You can")):
            lines = [text, told]
            random.shuffle(lines)
            return " ".join(lines), ask(question, answer, Exact(answer))
    return text, ()


def conversation(
    random: Random, turns: int | None = None, long_share: float = LONG_SYSTEM_SHARE
) -> Conversation:
    """One conversation to train on."""
    system, first = _system(random, long_share)
    turns = turns or random.choices((1, 2, 3, 4, 5), (40, 28, 17, 9, 6))[0]
    with_tools = chance(random, TOOLS_SHARE)
    exchanges = [exchange(random, tools=with_tools) for _ in range(turns)]
    tools: tuple[Tool, ...] = ()
    if with_tools:
        tools, exchanges = _with_tools(random, exchanges)
    if first:
        exchanges.insert(random.randrange(len(exchanges) + 1), first)
    messages = [] if system is None else [Message("system", system)]
    return Conversation((*messages, *(message for each in exchanges for message in each)), tools)


def _with_tools(
    random: Random, exchanges: list[Exchange]
) -> tuple[tuple[Tool, ...], list[Exchange]]:
    """Offer tools; most of the time, one exchange or two use one."""
    if chance(random, 0.2):
        return tooling.offer(random, None), exchanges
    wanted = tooling.use(random, exam=False)
    tools = tooling.offer(random, wanted)
    used: list[Exchange] = [tooling.exchange(wanted)]
    if chance(random, 0.3):
        for _ in range(20):
            other = tooling.use(random, exam=False)
            if other.tool["function"]["name"] == wanted.tool["function"]["name"]:
                used.append(tooling.exchange(tooling.fitted(other, wanted.tool)))
                break
    rest = exchanges[: len(exchanges) // 2]
    mixed = used + rest
    random.shuffle(mixed)
    return tools, mixed


def long_conversation(random: Random) -> Conversation:
    """A conversation of some thousand tokens: a long system prompt or text, then many turns."""
    messages = [Message("system", long_system(random, sentences_max=90))]
    exchanges = [exchange(random) for _ in range(random.randint(2, 20))]
    if chance(random, 0.5):
        prose = " ".join(sentence(random) for _ in range(random.randint(20, 150)))
        question, *others = topic(random, exam=False)
        exchanges.append((Message("user", f"{prose}\n\n{question.content}"), *others))
    return Conversation((*messages, *(message for each in exchanges for message in each)))


def corpus(seed: int, count: int) -> Iterator[Conversation]:
    """`count` conversations, the same for the same seed."""
    random = Random(seed)  # noqa: S311  -- a corpus is repeatable, not secret
    for _ in range(count):
        yield conversation(random)


@click.command()
@click.option("--count", default=10, show_default=True, help="How many conversations to show.")
@click.option("--seed", default=1, show_default=True, help="Seed of the generator.")
def main(count: int, seed: int) -> None:
    """Print some conversations of the training corpus, as the model reads them."""
    console = Console()
    for each in corpus(seed, count):
        console.print(render(each.messages, each.tools, add_generation_prompt=False), markup=False)
        console.rule()


if __name__ == "__main__":
    main()
