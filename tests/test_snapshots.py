"""A stream's state goes through the store and comes back, with the real llama.cpp and without."""

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from replica.batch import Batch, Chunk, Cut, Restore, Save
from replica.blocks import BLOCK_TOKENS, block_hashes, hash_root
from replica.kv_store import KvStore
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.llama import Llama, LlamaOptions
from replica.sampling import Drawn, Sampler
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from replica.snapshots import ReplicaSnapshots
from replica.wire import EnginePhase, Generate
from tests.fakes import END_TOKEN_ID, GREEDY, FakeRunner
from tests.gguf_samples import tiny_llama

ROOT = hash_root("model")
NAMESPACE = hash_root("model", "f16", "2")
MIB = 1024 * 1024
VOCAB_TOKENS = 32


@pytest.fixture
def store() -> Generator[KvStore]:
    with KvStore.create(8 * MIB) as store:
        yield store


def snapshots(store: KvStore, namespace: int = NAMESPACE) -> ReplicaSnapshots:
    return ReplicaSnapshots(store, namespace, ROOT, BLOCK_TOKENS)


def words(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB_TOKENS, count)]


def blocks(token_ids: list[int]) -> list[int]:
    return block_hashes(token_ids, BLOCK_TOKENS, ROOT)


def chunk(token_ids: list[int], stream_id: int, start: int = 0) -> Chunk:
    request = Generate("request", token_ids, len(token_ids), 10_000, GREEDY)
    sampler = Sampler(GREEDY, [], ignore_eos=False, prompt=token_ids, completion=[])
    sequence = Sequence(request, sampler)
    sequence.stream_id, sequence.computed_tokens = stream_id, start
    return Chunk(sequence, len(token_ids) - start)


class Machine:
    """A replica's scheduler on a fake model, with a store that others may share."""

    def __init__(self, store: KvStore, parallel: int = 1) -> None:
        held = snapshots(store)
        self.runner = FakeRunner(parallel, 400, batch_tokens_max=400)
        self.runner.snapshots = held
        self.streams = KvStreams(parallel, BLOCK_TOKENS, ROOT, trimmable=True)
        limits = Limits(400, VOCAB_TOKENS, 400, 400, 10)
        self.scheduler = Scheduler(self.streams, limits, [END_TOKEN_ID], None, held)

    def serve(self, prompt: list[int]) -> int:
        """Serve a request of one token; return how many of its prompt were computed."""
        before = self.runner.rows
        self.scheduler.submit(Generate("r", prompt, len(prompt), 1, GREEDY))
        while (batch := self.scheduler.schedule()) is not None:
            for move in batch.moves:
                if not self.runner.move(move) and isinstance(move, Restore):
                    self.scheduler.restore_failed(move)
                    break
            else:
                self.runner.decode(batch)
                self.scheduler.commit(batch, [[Drawn(5, None)] for _ in batch.sampled])
        return self.runner.rows - before

    def rest(self) -> int:
        """Save what is worth it while nothing runs; return how many snapshots that made."""
        made = 0
        while (save := self.scheduler.rest()) is not None:
            made += self.runner.move(save)
        return made


def test_what_a_stream_gives_up_is_restored_when_it_is_asked_for_again(store: KvStore) -> None:
    machine = Machine(store)
    first, second = words(160, 1), words(160, 2)

    assert [160, 160] == [machine.serve(first), machine.serve(second)]
    assert 16 == machine.serve(first), "but for the last block, which holds the last token"
    assert {"store": 144} == machine.scheduler.prefixes.take_cached_tokens()


def test_at_rest_everything_worth_it_is_saved_once(store: KvStore) -> None:
    machine = Machine(store, parallel=3)
    for seed, count in ((1, 100), (2, 200), (3, 20)):
        machine.serve(words(count, seed))

    assert [2, 0] == [machine.rest(), machine.rest()]


def test_another_replica_restores_what_one_has_saved(store: KvStore) -> None:
    """Also when the first one is dead: nothing of it is needed."""
    first = Machine(store)
    prompt = words(200)
    first.serve(prompt)
    first.rest()

    assert 8 == Machine(store).serve(prompt)


def test_a_shared_beginning_is_found_whatever_follows_it(store: KvStore) -> None:
    machine = Machine(store)
    machine.serve([*words(160), *words(60, seed=7)])
    machine.rest()

    assert 60 == Machine(store).serve([*words(160), *words(60, seed=8)])


def test_a_snapshot_that_cannot_be_restored_is_computed_instead(store: KvStore) -> None:
    first, second = Machine(store), Machine(store)
    prompt = words(200)
    first.serve(prompt)
    first.rest()
    second.runner.restores_fail = True

    assert 200 == second.serve(prompt)
    assert second.runner.cells[0][:200] == prompt


def test_another_namespace_finds_nothing(store: KvStore) -> None:
    machine = Machine(store)
    machine.serve(words(200))
    machine.rest()

    assert None is snapshots(store, NAMESPACE + 1).find(words(200), 0, whole=False)
    assert None is not snapshots(store).find(words(200), 0, whole=False)


@pytest.mark.model
def test_a_state_of_llama_cpp_goes_on_in_another_context(store: KvStore, tmp_path: Path) -> None:
    """Bit for bit: the restored cells are the ones that were saved."""
    path = tiny_llama(tmp_path / "tiny.gguf")
    prompt = words(90)
    expected = alone(path, prompt)
    first = Llama(LlamaOptions(path, 256, 2, threads=1), snapshots(store))
    first.decode(Batch(EnginePhase.PREFILL, [chunk(prompt[:80], 1)], []))
    assert first.move(Save(1, prompt[:80], blocks(prompt[:80])))
    first.close()
    second = Llama(LlamaOptions(path, 256, 2, threads=1), snapshots(store))
    found = snapshots(store).find(prompt, 0, whole=False)
    assert found is not None
    assert second.move(Restore(0, found.data, found.tokens))
    (row,) = second.decode(Batch(EnginePhase.PREFILL, [chunk(prompt, 0, found.tokens)], []))

    assert 80 == found.tokens
    np.testing.assert_allclose(row, expected, rtol=0, atol=0.03)
    second.close()


@pytest.mark.model
def test_damaged_states_leave_an_empty_stream(store: KvStore, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    prompt = words(64)
    llama = Llama(LlamaOptions(path, 256, 2, threads=1), snapshots(store))
    llama.decode(Batch(EnginePhase.PREFILL, [chunk(prompt, 0)], []))
    assert llama.move(Save(0, prompt, blocks(prompt)))
    found = snapshots(store).find([*prompt, 1], 0, whole=False)
    assert found is not None

    assert not llama.move(Restore(1, found.data[:-100].copy(), 64))
    assert llama.move(Cut(1, 0))
    llama.decode(Batch(EnginePhase.PREFILL, [chunk(prompt, 1)], []))
    llama.close()


def alone(path: Path, prompt: list[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    llama = Llama(LlamaOptions(path, 256, 2, threads=1))
    (row,) = llama.decode(Batch(EnginePhase.PREFILL, [chunk(prompt, 0)], []))
    copy = row.copy()
    llama.close()
    return copy
