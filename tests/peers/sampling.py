"""Drawing one token: ours beside llama.cpp's own sampler chains, on the same rows.

    python -m tests.peers.sampling [n_vocab]

Both do the same steps in the same order. llama.cpp is timed without filling its array of
candidates from the logits, which a server has to do for every token. Medians, in microseconds.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from statistics import median

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from replica.sampling import Sampler
from replica.wire import Sampling

ROUNDS = 60
SEEN_TOKENS = 500

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

CASES = {
    "greedy": Sampling(seed=1, temperature=0.0),
    "temperature 1": Sampling(seed=1),
    "temperature 0.7": Sampling(seed=1, temperature=0.7),
    "top_p 0.95": Sampling(seed=1, top_p=0.95),
    "temperature 0.7, top_p 0.9": Sampling(seed=1, temperature=0.7, top_p=0.9),
    "top_k 40, top_p 0.95": Sampling(seed=1, top_k=40, top_p=0.95),
    "min_p 0.05": Sampling(seed=1, min_p=0.05),
    "greedy, penalties": Sampling(
        seed=1, temperature=0.0, repeat_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
    "top_p 0.95, penalties": Sampling(
        seed=1, top_p=0.95, repeat_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
}


def rows(n_vocab: int) -> dict[str, NDArray[np.float32]]:
    """Peaked: a few tokens dominate noise of deviation 2.5. Flat: noise of deviation 1."""
    rng = np.random.default_rng(1)
    peaked = rng.normal(0, 2.5, n_vocab).astype(np.float32)
    peaked[rng.choice(n_vocab, 8, replace=False)] = [20, 19, 18.5, 17, 16, 15, 15, 14]
    return {"peaked": peaked, "flat": rng.normal(0, 1, n_vocab).astype(np.float32)}


def timed(prepare: Callable[[], None], work: Callable[[], object]) -> float:
    """Median microseconds of `work`, each time after `prepare`."""
    spent = []
    for _ in range(ROUNDS):
        prepare()
        begun = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begun)
    return median(spent) * 1e6


def ours(row: NDArray[np.float32], sampling: Sampling, seen: list[int]) -> float:
    sampler = Sampler(sampling, [], ignore_eos=False, prompt=[], completion=seen)
    working = row.copy()
    return timed(lambda: np.copyto(working, row), lambda: sampler.draw(working, 0))


def theirs(row: NDArray[np.float32], sampling: Sampling, seen: list[int]) -> float:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for stage in _stages(row.size, sampling):
        llama_cpp.llama_sampler_chain_add(chain, stage)
    for token_id in seen:
        llama_cpp.llama_sampler_accept(chain, token_id)
    source = np.zeros(row.size, CANDIDATE)
    source["id"] = np.arange(row.size)
    source["logit"] = row
    working = source.copy()
    array = llama_cpp.llama_token_data_array()

    def prepare() -> None:
        np.copyto(working, source)
        pointer = ctypes.POINTER(llama_cpp.llama_token_data)
        array.data = ctypes.cast(working.ctypes.data, pointer)
        array.size, array.selected, array.sorted = row.size, -1, False

    try:
        return timed(prepare, lambda: llama_cpp.llama_sampler_apply(chain, ctypes.byref(array)))
    finally:
        llama_cpp.llama_sampler_free(chain)


def _stages(n_vocab: int, sampling: Sampling) -> list[object]:
    stages: list[object] = []
    if sampling.repeat_penalty != 1:
        repeat, presence = sampling.repeat_penalty, sampling.presence_penalty
        frequency = sampling.frequency_penalty
        init = llama_cpp.llama_sampler_init_penalties
        stages.append(init(n_vocab, SEEN_TOKENS, repeat, frequency, presence))
    if sampling.temperature == 0:
        return [*stages, llama_cpp.llama_sampler_init_greedy()]
    if sampling.temperature != 1:
        stages.append(llama_cpp.llama_sampler_init_temp(sampling.temperature))
    if sampling.min_p:
        stages.append(llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1))
    if sampling.top_k:
        stages.append(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        stages.append(llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1))
    return [*stages, llama_cpp.llama_sampler_init_dist(sampling.seed)]


def main(n_vocab: int) -> None:
    table = Table(title=f"One draw from {n_vocab:,} logits, µs")
    for heading in ("logits", "request"):
        table.add_column(heading)
    for heading in ("ours", "llama.cpp", "ratio"):
        table.add_column(heading, justify="right")
    for shape, row in rows(n_vocab).items():
        for name, sampling in CASES.items():
            seen = np.random.default_rng(2).choice(n_vocab, SEEN_TOKENS, replace=False).tolist()
            mine, other = ours(row, sampling, seen), theirs(row, sampling, seen)
            table.add_row(shape, name, f"{mine:.0f}", f"{other:.0f}", f"{other / mine:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 151_936)
