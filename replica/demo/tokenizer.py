"""The tokenizer: byte-level BPE over the corpus, with every byte in its vocabulary.

Texts are split as llama.cpp splits them for `tokenizer.ggml.pre` = "qwen2" (digits stand alone), so
that training and serving see the same tokens. This file knows texts, and no model.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from replica.demo.conversation import SPECIAL_TOKENS, render
from replica.demo.corpus import corpus

VOCABULARY = 2048
PRE_TOKENIZER = "qwen2"
"""Its name in llama.cpp; `_SPLIT` is its regular expression."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(seed: int, conversations: int) -> Tokenizer:
    """Learn the merges from a part of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, conversations), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a tokenizer that `train` made."""
    return Tokenizer.from_file(str(path))


def _texts(seed: int, conversations: int) -> Iterator[str]:
    marks = re.compile("|".join(re.escape(mark) for mark in SPECIAL_TOKENS))
    for each in corpus(seed, conversations):
        yield from marks.split(render(each.messages, each.tools, add_generation_prompt=False))


def merges(tokenizer: Tokenizer) -> list[str]:
    """The merges in their order, as a GGUF file lists them."""
    pairs: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in pairs]
