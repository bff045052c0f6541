"""Name a prompt's prefix blocks. Replica and gateway must agree on every bit of this file."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 16
"""Tokens per block: a match is known to this many tokens, and no finer."""


def block_hashes(
    token_ids: Sequence[int], block_tokens: int, root: int, known: Sequence[int] = ()
) -> list[int]:
    """Return one hash per full block; each covers its block and everything before it.

    Chaining makes a hash mean "this whole prefix", so the length of a match is a count of
    leading hashes found, and no tree is needed to compare prompts. `root` stands in front of
    the first block: prompts under different roots (models, tenants) never share a name. `known`
    are the hashes of leading blocks the caller has already computed.
    """
    assert block_tokens > 0
    assert len(known) * block_tokens <= len(token_ids)
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        block = array("i", token_ids[start : start + block_tokens]).tobytes()
        digest = blake2b(parent.to_bytes(8, "little") + block, digest_size=8).digest()
        parent = int.from_bytes(digest, "little")
        hashes.append(parent)
    return hashes


def hash_root(*parts: str) -> int:
    """Return the root for prompts that may share blocks: same model, same tenant."""
    joined = "\0".join(parts).encode()
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little")
