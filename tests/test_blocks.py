"""Names of prefix blocks: replica and gateway must derive the same ones, everywhere and always."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.blocks import BLOCK_TOKENS, block_hashes, hash_root

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def documented(token_ids: list[int], block_tokens: int, root: int) -> list[int]:
    """What the names are, said once more: BLAKE2b of the parent and the block, chained."""
    names = []
    parent = root
    for index in range(len(token_ids) // block_tokens):
        block = token_ids[index * block_tokens : (index + 1) * block_tokens]
        message = parent.to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in block)
        parent = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
        names.append(parent)
    return names


@given(tokens, st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_names_are_the_documented_ones(token_ids: list[int], block_tokens: int, root: int) -> None:
    """A gateway of another build, or in another language, must come to the same names."""
    assert documented(token_ids, block_tokens, root) == block_hashes(token_ids, block_tokens, root)


def test_equal_blocks_after_different_prefixes_have_different_names() -> None:
    """A name means its whole prefix, so a match is counted without a tree."""
    one, other = block_hashes([1, 1, 5, 5], 2, 0), block_hashes([2, 2, 5, 5], 2, 0)
    assert set(one).isdisjoint(other)


def test_a_repeated_block_has_a_new_name_each_time() -> None:
    assert 3 == len(set(block_hashes([7, 7] * 3, 2, 0)))


def test_a_common_prefix_has_common_names_up_to_the_last_whole_block() -> None:
    one, other = block_hashes([1, 2, 3, 4, 5, 6], 2, 9), block_hashes([1, 2, 3, 4, 5, 0], 2, 9)
    assert [True, True, False] == [a == b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_only_whole_blocks_have_names(length: int, blocks: int) -> None:
    assert blocks == len(block_hashes([1] * length, 2, 0))


@given(tokens, st.integers(1, 5), st.data())
def test_known_names_are_continued(
    token_ids: list[int], block_tokens: int, data: st.DataObject
) -> None:
    names = block_hashes(token_ids, block_tokens, 3)
    known = names[: data.draw(st.integers(0, len(names)))]
    assert names == block_hashes(token_ids, block_tokens, 3, known)
    assert names[: len(known)] == known, "the caller's list is not touched"


def test_prompts_under_different_roots_share_no_names() -> None:
    one, other = hash_root("model", "tenant"), hash_root("model", "other")
    assert set(block_hashes([1, 2], 1, one)).isdisjoint(block_hashes([1, 2], 1, other))


def test_the_parts_of_a_root_do_not_run_together() -> None:
    assert hash_root("ab", "c") != hash_root("a", "bc")


def test_names_never_change() -> None:
    """Replicas of one version and gateways of another meet; so these are written down."""
    root = hash_root("model")
    assert 0x1A0A1AB592DD5B1D == root
    assert [0xB17075A87D570F6D] == block_hashes(range(BLOCK_TOKENS), BLOCK_TOKENS, root)
    assert 16 == BLOCK_TOKENS
