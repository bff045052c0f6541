"""Turns trained weights into the GGUF file that is shipped: `python -m replica.demo.convert`.

Matrices become Q8_0, norms stay F32. The file is then opened with llama.cpp and compared with what
was trained: the same tokens for a few hundred texts, and nearly the same logits. Needs the `train`
extra; this is the only file that knows both PyTorch and GGUF.
"""

from pathlib import Path
from random import Random
from typing import Any

import click
import gguf
import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from replica.demo import tokenizer as bpe
from replica.demo.conversation import (
    MODEL_FILE,
    SPECIAL_TOKENS,
    TEMPLATE_FILE,
    TEXT_END,
    TURN_END,
    render,
)
from replica.demo.corpus import corpus
from replica.demo.model import Model, Shape
from replica.demo.talker import Talker
from replica.demo.words import SCRIPTS, characters, sentence

FILE_BYTES_MAX = 6_000_000
EXACT_DIFFERENCE_MAX = 0.1
"""How far apart the logits of PyTorch and of an unquantized file may be: the cache is F16."""
SHIPPED_DIFFERENCE_MAX = 1.0
"""The same for Q8_0, which rounds weights."""

_ODD_TEXTS = (
    *("", " ", "\n", "\n\n  \n", "\t tab", "a  b   c", "don't I'll WE'VE it's", "1234567890"),
    *(
        "Grüße, naïve café",
        "日本語のテキスト",
        "中文字符。",
        "한국어",
        "العربية",
        "עברית",
        "हिन्दी",
        "ไทย",
    ),
    *(
        "😀👍🏽👨\u200d👩\u200d👧🇩🇪",
        "a\u0301 e\u0308",
        "\u200b\ufeff",
        "x\r\ny\r\n",
        "}}}]]);;--==++",
    ),
    *("  indented\n    more", "C:\\path\\file", "\u00a0nbsp", "Ⅷ ½ ² ٣", "3.14e-10"),
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
)


def write(model: Model, tokenizer: Tokenizer, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a GGUF file whose matrices are of this kind."""
    shape = model.shape
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, shape)
    _describe_tokenizer(writer, tokenizer, shape)
    for name, weight in model.state_dict().items():
        values = weight.detach().float().numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, shape: Shape) -> None:  # noqa: ANN401 - gguf is untyped
    writer.add_name("numaserve demo")
    writer.add_description("A tiny chat model for trying numaserve; trained by the project itself")
    writer.add_license("mit")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _describe_tokenizer(writer: Any, tokenizer: Tokenizer, shape: Shape) -> None:  # noqa: ANN401
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [index for _, index in vocabulary] == list(range(shape.vocabulary))
    tokens = [token for token, _ in vocabulary]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(bpe.PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(bpe.merges(tokenizer))
    writer.add_bos_token_id(tokenizer.token_to_id(TEXT_END))
    writer.add_eos_token_id(tokenizer.token_to_id(TURN_END))
    writer.add_eot_token_id(tokenizer.token_to_id(TURN_END))
    writer.add_pad_token_id(tokenizer.token_to_id(TEXT_END))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(TEMPLATE_FILE.read_text())


def texts_to_compare(seed: int) -> list[str]:
    """Texts of every script and shape, and pieces of the corpus."""
    random = Random(seed)  # noqa: S311  -- a comparison is repeatable, not secret
    made = [
        render(each.messages, each.tools, add_generation_prompt=True) for each in corpus(seed, 200)
    ]
    made += [characters(random) + random.choice(SCRIPTS) + sentence(random) for _ in range(100)]
    made += ["".join(chr(random.randrange(1, 0x3000)) for _ in range(30)) for _ in range(100)]
    return [*_ODD_TEXTS, *made]


def differing_texts(tokenizer: Tokenizer, talker: Talker, texts: list[str]) -> list[str]:
    """Texts that llama.cpp cuts into other tokens than training did."""
    return [
        text
        for text in texts
        if tokenizer.encode(text, add_special_tokens=False).ids != talker.tokenize(text)
    ]


def logit_difference(model: Model, tokenizer: Tokenizer, talker: Talker, texts: list[str]) -> float:
    """The largest difference between the last logits of PyTorch and of llama.cpp."""
    worst = 0.0
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            expected = model(torch.tensor([tokens]))[0, -1].numpy()
        worst = max(worst, float(np.abs(expected - talker.logits(tokens)).max()))
    return worst


def _check(
    model: Model, tokenizer: Tokenizer, path: Path, difference_max: float, console: Console
) -> None:
    texts = texts_to_compare(seed=99)
    with Talker.load(path) as talker:
        differing = differing_texts(tokenizer, talker, texts)
        difference = logit_difference(model, tokenizer, talker, texts[-230:-200])
    console.print(
        f"{path.name}: {len(texts) - len(differing)} of {len(texts)} texts tokenized alike"
    )
    console.print(f"{path.name}: largest difference of logits {difference:.4f}")
    if differing or not difference <= difference_max:
        message = (
            f"{path} does not compute what was trained; first differing text: {differing[:1]!r}"
        )
        raise click.ClickException(message)


@click.command()
@click.option(
    "--trained",
    type=click.Path(path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Folder that the training wrote.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=MODEL_FILE,
    show_default=True,
    help="The GGUF file to write.",
)
def main(trained: Path, out: Path) -> None:
    """Write the trained demo model as a GGUF file, and compare the two."""
    console = Console()
    stored = torch.load(trained / "model.pt", weights_only=True)
    model = Model(Shape(**stored["shape"]))
    model.load_state_dict(stored["weights"])
    tokenizer = bpe.load(trained / "tokenizer.json")
    exact = trained / "exact.gguf"
    write(model, tokenizer, exact, gguf.GGMLQuantizationType.F32)
    _check(model, tokenizer, exact, EXACT_DIFFERENCE_MAX, console)
    write(model, tokenizer, out, gguf.GGMLQuantizationType.Q8_0)
    _check(model, tokenizer, out, SHIPPED_DIFFERENCE_MAX, console)
    size = out.stat().st_size
    console.print(f"{out.name}: {size} bytes")
    if size > FILE_BYTES_MAX:
        message = f"{out} is larger than {FILE_BYTES_MAX} bytes"
        raise click.ClickException(message)


if __name__ == "__main__":
    main()
