"""Which replica holds which prefix blocks, as told by the replicas' own KV events.

Exact as of the last frame heard of each replica. Knows names of blocks, never their tokens.
"""

from collections.abc import Sequence

from replica.wire import Evicted, Frame, Hello, Stored


class PrefixIndex:
    """A set of block names per replica, and the frame number each set is as of."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}
        self._frames: dict[str, int] = {}

    def open(self, replica_id: str, hello: Hello) -> None:
        """Start from the complete state that opens every connection."""
        self._blocks[replica_id] = set(hello.blocks)
        self._frames[replica_id] = 0

    def apply(self, replica_id: str, frame: Frame) -> bool:
        """Fold one frame in. False means some were missed: the caller must reconnect."""
        last = self._frames.get(replica_id)
        if last is None or last + 1 != frame.seq:
            self.forget(replica_id)
            return False
        self._frames[replica_id] = frame.seq
        held = self._blocks[replica_id]
        for event in frame.events:
            match event:
                case Stored(blocks):
                    held.update(blocks)
                case Evicted(blocks):
                    held.difference_update(blocks)
        return True

    def forget(self, replica_id: str) -> None:
        self._blocks.pop(replica_id, None)
        self._frames.pop(replica_id, None)

    def matched_blocks(self, replica_id: str, hashes: Sequence[int]) -> int:
        """Count the leading blocks of a prompt that the replica holds."""
        held = self._blocks.get(replica_id, set())
        for count, block in enumerate(hashes):
            if block not in held:
                return count
        return len(hashes)

    def held_blocks(self, replica_id: str) -> list[int]:
        return sorted(self._blocks.get(replica_id, set()))
