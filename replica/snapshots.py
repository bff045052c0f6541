"""The snapshot store as one replica sees it: only what fits its model and its way of holding it.

Between the scheduler, which looks prompts up, llama.cpp, which writes states, and the store, which
knows neither. A state is only good for a context of the same model, cell type and number of
streams: all of that is in the namespace.
"""

from collections.abc import Callable, Sequence

from replica.blocks import block_hashes
from replica.kv_store import KvStore
from replica.prefixes import Snapshot


class ReplicaSnapshots:
    """A `replica.prefixes.Snapshots` and a `replica.llama.SnapshotStore`."""

    def __init__(self, store: KvStore, namespace: int, root: int, block_tokens: int) -> None:
        self._store = store
        self._namespace = namespace
        self._root = root
        self._block_tokens = block_tokens

    def find(self, token_ids: Sequence[int], longer_than: int, *, whole: bool) -> Snapshot | None:
        """Return the snapshot with the longest shared prefix, copied and verified."""
        # The last token is always computed: its logits choose the next one.
        hashes = block_hashes(token_ids[:-1], self._block_tokens, self._root)
        if len(hashes) * self._block_tokens <= longer_than:
            return None
        found = self._store.find(self._namespace, hashes, whole=whole)
        if found is None or found.blocks * self._block_tokens <= longer_than:
            return None
        data = self._store.read(found, token_ids)
        return None if data is None else Snapshot(found.blocks * self._block_tokens, data)

    def put(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        size: int,
        write: Callable[[memoryview], int],
    ) -> bool:
        return self._store.put(self._namespace, token_ids, blocks, size, write)
