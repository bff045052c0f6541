"""Processes that share a KV store with the tests, and come to grief in it.

`python -m tests.kv_children WHAT ARGUMENT…`. A child that has to be caught somewhere stops
itself there, so that nobody waits for a moment: the parent waits for the stop.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import numpy as np

from replica import kv_arena, kv_memory, kv_store
from replica.blocks import BLOCK_TOKENS, block_hashes
from replica.kv_arena import Layout
from replica.kv_memory import ARENA_AT
from replica.kv_store import Found, KvStore

NAMESPACE = 7
PAGE = 4096
STORM_PROMPTS = 60
STORM_STEPS = 1500


# What is stored


def names(token_ids: Sequence[int]) -> list[int]:
    return block_hashes(token_ids, BLOCK_TOKENS, root=1)


def prompt(number: int, blocks: int = 1) -> list[int]:
    """A prompt that shares its first token with no other."""
    return [number] * (blocks * BLOCK_TOKENS)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def page_sized(pages: int, blocks: int = 1) -> int:
    """The size of a snapshot that takes exactly so many pages of the arena."""
    return pages * PAGE - Layout(blocks, blocks * BLOCK_TOKENS, 0).data_at


def room_for(pages: int) -> int:
    """The budget of a store whose arena has so many pages."""
    return ARENA_AT + pages * PAGE


def writer(data: bytes) -> Callable[[memoryview], int]:
    def write(view: memoryview) -> int:
        view[:] = data
        return len(data)

    return write


def put(store: KvStore, token_ids: Sequence[int], data: bytes, namespace: int = NAMESPACE) -> bool:
    return store.put(namespace, token_ids, names(token_ids), len(data), writer(data))


def put_pages(store: KvStore, number: int, pages: int) -> bool:
    return put(store, prompt(number), content(number, page_sized(pages)))


def find(
    store: KvStore, token_ids: Sequence[int], namespace: int = NAMESPACE, *, whole: bool = False
) -> Found | None:
    return store.find(namespace, names(token_ids), whole=whole)


def read(store: KvStore, token_ids: Sequence[int], namespace: int = NAMESPACE) -> bytes | None:
    """Find and read, as the scheduler would."""
    found = find(store, token_ids, namespace)
    copy = store.read(found, token_ids) if found else None
    return None if copy is None else bytes(copy)


def found_by(store: KvStore, token_ids: Sequence[int], *, whole: bool = False) -> Found:
    there = find(store, token_ids, whole=whole)
    assert there is not None
    return there


def held(store: KvStore, *numbers: int) -> list[int]:
    """Which of these prompts have a snapshot; to look is not to use."""
    return [number for number in numbers if find(store, prompt(number))]


# Who stores it


def start(what: str, *arguments: object, fd: int | None = None) -> "subprocess.Popen[str]":
    """Start a child; with `fd` it inherits the store and is told its number."""
    given = () if fd is None else (fd,)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kv_children", what, *map(str, (*given, *arguments))],
        pass_fds=given,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def wait_until_stopped(child: "subprocess.Popen[str]") -> None:
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it ended instead, with status {status}"


def resume(child: "subprocess.Popen[str]") -> str:
    """Let a stopped child go on to its end, and return what it had to say."""
    child.send_signal(signal.SIGCONT)
    return finish(child)


def kill(child: "subprocess.Popen[str]") -> None:
    child.kill()
    finish(child)


def finish(child: "subprocess.Popen[str]") -> str:
    said, _ = child.communicate()
    return said.strip()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def put_and_die(fd: str, number: str, size: str) -> None:
    assert put(KvStore.attach(int(fd)), prompt(int(number)), content(int(number), int(size)))
    os.kill(os.getpid(), signal.SIGKILL)


def stop_while_writing(fd: str, number: str, size: str) -> None:
    data = content(int(number), int(size))
    half = len(data) // 2

    def write(view: memoryview) -> int:
        view[:half] = data[:half]
        os.kill(os.getpid(), signal.SIGSTOP)
        view[half:] = data[half:]
        return len(data)

    token_ids = prompt(int(number))
    store = KvStore.attach(int(fd))
    say(store.put(NAMESPACE, token_ids, names(token_ids), len(data), write))


def stop_holding_the_table(fd: str) -> None:
    with KvStore.attach(int(fd))._locked():
        os.kill(os.getpid(), signal.SIGSTOP)


def share_a_file(path: str, budget: str) -> None:
    """Read what the parent has put there, put something, and stop before leaving."""
    with KvStore.at(Path(path), int(budget)) as store:
        put(store, prompt(2), content(2, 100))
        say(read(store, prompt(1)) == content(1, 100))
        os.kill(os.getpid(), signal.SIGSTOP)


def come_and_go(path: str, number: str) -> None:
    for _ in range(300):
        with KvStore.at(Path(path), room_for(4)) as store:
            put(store, prompt(int(number)), content(int(number), 100))
            assert Path(path).exists(), "removed while it was in use"
            assert read(store, prompt(int(number))) in {None, content(int(number), 100)}
    say("done")


def storm(fd: str, seed: str) -> None:
    """Put and read at random; print how much of either was done, or fail at a wrong byte."""
    store = KvStore.attach(int(fd))
    chance = random.Random(int(seed))
    prompts = [_storm_prompt(number) for number in range(STORM_PROMPTS)]
    data = [_storm_data(number) for number in range(STORM_PROMPTS)]
    puts = reads = 0
    for _ in range(STORM_STEPS):
        number = chance.randrange(STORM_PROMPTS)
        token_ids = prompts[number]
        puts += put(store, token_ids, data[number])
        found = find(store, token_ids)
        os.sched_yield()
        copy = store.read(found, token_ids) if found else None
        if found is None or copy is None:
            continue
        there = int(copy[:4].view(np.uint32)[0])
        matched = found.blocks * BLOCK_TOKENS
        assert data[there] == bytes(copy), f"{there} is not what was put"
        assert prompts[there][:matched] == token_ids[:matched], f"{there} for {number}"
        reads += 1
    say(puts, reads)


def _storm_prompt(number: int) -> list[int]:
    """Prompts in three families that share their first blocks."""
    shared = prompt(number % 3, 1 + number % 4)
    return shared + prompt(1000 + number, 1 + number % 5) + [number] * (number % BLOCK_TOKENS)


def _storm_data(number: int) -> bytes:
    return number.to_bytes(4, "little") + content(number, 1 + 2500 * (number % 13))


def die_at_every_line() -> None:
    """Put into full stores, each time killed one line later; print how many lines there are."""
    killed_at = 1
    while True:
        with KvStore.create(room_for(4)) as store:
            for number in (1, 2, 3):
                assert put_pages(store, number, 1)
            pid = os.fork()
            if pid == 0:
                _put_and_die_at(killed_at, store.fileno())
            _, status = os.waitpid(pid, 0)
            _assert_unharmed(store)
        if not os.WIFSIGNALED(status):
            break
        killed_at += 1
    say(killed_at)


def _put_and_die_at(line: int, fd: int) -> None:
    files = {module.__file__ for module in (kv_arena, kv_memory, kv_store)}
    lines = 0

    def on_line(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if lines == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    mine = KvStore.attach(os.dup(fd))
    sys.settrace(on_line)  # type: ignore[arg-type]  # it returns itself
    done = put_pages(mine, 9, 3) and put_pages(mine, 8, 1)
    sys.settrace(None)
    os._exit(0 if done else 1)


def _assert_unharmed(store: KvStore) -> None:
    """What is found is right, and all of the arena can be had again."""
    for number, pages in ((1, 1), (2, 1), (3, 1), (8, 1), (9, 3)):
        there = read(store, prompt(number))
        assert there in {None, content(number, page_sized(pages))}
    assert store.stats().bytes_used <= room_for(4)
    assert put_pages(store, 5, 4)
    assert content(5, page_sized(4)) == read(store, prompt(5))
    assert (0, 0) == (store.stats().resets, store.stats().corrupt)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
