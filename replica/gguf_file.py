"""Find a model's GGUF file or files, say what is in them, and refuse what cannot be served.

`read_gguf` reads headers and a few samples of the weights, never the weights themselves, so it
takes milliseconds on files of any size and runs before anything is loaded. It knows no llama.cpp
at run time, only tables copied from it; that `replica.llama` can load the model is likely, not
certain, afterwards.
"""

import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from replica.cache_shape import WIDTH_MAX, CacheShape, Kind, cache_kind, cache_shape
from replica.gguf_header import DAMAGED, MAGIC, Header, ModelFileError, Tensor, read_header
from replica.llama_cpp_tables import (
    EXPERTS_MAX,
    FILE_TYPES,
    LAYERS_MAX,
    LLAMA_CPP_PYTHON_VERSION,
    OTHER_ARCHITECTURES,
    TEXT_ARCHITECTURES,
)

__all__ = ["GgufFile", "Kind", "ModelFileError", "Tensor", "model_name", "read_gguf", "split_names"]

SPLITS_MAX = 1_000
_SPLIT_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.ASCII)
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_POOLING_MAX = 4
"""The last of llama_pooling_type; 0 is none."""
_LISTED_MAX = 3


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model that this server can run, as its metadata describes it."""

    path: Path
    """What llama.cpp is given to load: the first file of a split model."""
    parts: tuple[Path, ...]
    version: int
    architecture: str
    kind: Kind
    name: str
    """What its maker calls it; may be empty."""
    quantization: str
    n_layers: int
    n_embd: int
    n_ff: int
    """The widest feed-forward layer's; 0 in some mixtures of experts."""
    n_heads: tuple[int, ...]
    """Per layer, as n_kv_heads."""
    n_kv_heads: tuple[int, ...]
    head_width: int
    """Of a query head."""
    n_ctx_train: int
    n_vocab: int
    n_merges: int
    n_experts: int
    n_experts_used: int
    n_ff_expert: int
    cache: CacheShape
    has_chat_template: bool
    tensor_count: int
    weights_bytes: int
    tied_embedding: Tensor | None
    """The token embedding, if it also serves as output matrix."""
    file_bytes: int
    fingerprint: str
    """Equal for equal bytes, wherever they lie; see `_fingerprint` for what it may overlook."""


def read_gguf(path: Path) -> GgufFile:
    """Read what is to be known of a model before it is loaded; raises `ModelFileError`.

    Any part of a split model stands for the whole: `GgufFile.path` is the first one.
    """
    first = _first_part(path)
    header = _open_header(first)
    _refuse_other_than_text(header)
    headers = [header, *_other_parts(header)]
    tensors = [tensor for part in headers for tensor in part.tensors]
    if not tensors:
        remedy = "choose the file that holds the model's weights"
        raise ModelFileError(first, "holds no tensors, only metadata or a vocabulary", remedy)
    return _describe(headers, tensors)


def split_names(name: str) -> list[str]:
    """Return the file names of the whole model, in order, given the name of any of its files."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    stem, count = match[1], min(int(match[2]), SPLITS_MAX)
    return [f"{stem}-{number:05}-of-{match[2]}.gguf" for number in range(1, count + 1)] or [name]


def model_name(name: str) -> str:
    """Return a file's name without what makes it a file: the ending and a part's number."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1] if match else name.removesuffix(".gguf")


def _first_part(path: Path) -> Path:
    """Return where a model begins, given any of its files, after checking that it is a file."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "check the path given to --model"
        raise ModelFileError(path, f"cannot be opened: {reason}", remedy) from None
    if stat.S_ISDIR(mode):
        names = sorted(file.name for file in path.glob("*.gguf"))[:_LISTED_MAX]
        listed = f"such as {', '.join(names)}" if names else "but it holds none"
        raise ModelFileError(path, "is a directory", f"give a .gguf file, {listed}")
    if not stat.S_ISREG(mode):
        raise ModelFileError(path, "is not a regular file", "give a .gguf file")
    return path.with_name(split_names(path.name)[0])


def _open_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            start = file.read(64)
        if not start.startswith(MAGIC):
            found, remedy = _recognise(start)
            raise ModelFileError(path, found, remedy)
        return read_header(path)
    except OSError as error:
        found = f"cannot be read: {error.strerror or error}"
        raise ModelFileError(path, found, "check that it is there and readable") from None


def _recognise(start: bytes) -> tuple[str, str]:
    """Say what a file that is no GGUF probably is, and what to do about it."""
    known = {
        b"version https://git-lfs": ("is a Git LFS pointer, not the model", "run `git lfs pull`"),
        b"<!doctype html": ("is a web page", "download the file behind the page's download link"),
        b"<html": ("is a web page", "download the file behind the page's download link"),
        b"pk\x03\x04": ("is a zip archive or PyTorch checkpoint", _CONVERT),
        b"\x1f\x8b": ("is compressed with gzip", "unpack it first"),
        b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "unpack it first"),
    } | dict.fromkeys(
        (b"lmgg", b"tjgg", b"fmgg", b"algg"),
        ("is a GGML file, the format before GGUF", "get or convert a GGUF of this model"),
    )
    if not start:
        return "is empty", "download or copy it again"
    for magic, answer in known.items():
        if start.lower().startswith(magic):
            return answer
    if start[8:10] == b'{"':
        return "is a safetensors file", _CONVERT
    return f"is not a GGUF file: it begins with {start[:8]!r}", "give a .gguf file"


_CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py or download its GGUF"


def _refuse_other_than_text(header: Header) -> None:
    """Refuse everything but a model that produces text token by token."""
    path, kind = header.path, header.text("general.type", "model")
    architecture = header.text("general.architecture")
    remedy = "choose a model that generates text"
    if kind != "model":
        raise ModelFileError(path, f"is not a model but of the kind {kind[:32]!r}", remedy)
    if not architecture:
        raise ModelFileError(path, "does not name its architecture", DAMAGED)
    if architecture in OTHER_ARCHITECTURES:
        what = OTHER_ARCHITECTURES[architecture]
        raise ModelFileError(path, f"is {what} (architecture {architecture!r})", remedy)
    if architecture not in TEXT_ARCHITECTURES:
        found = (
            f"has the architecture {architecture[:64]!r}, which the llama.cpp in llama-cpp-python "
            f"{LLAMA_CPP_PYTHON_VERSION} does not support"
        )
        raise ModelFileError(path, found, "choose a model of another architecture")
    pooling = header.metadata.get(f"{architecture}.pooling_type", 0)
    causal = header.metadata.get(f"{architecture}.attention.causal", True)
    if pooling in range(1, _POOLING_MAX + 1) or causal is False:
        raise ModelFileError(path, "is a model for embeddings or ranking", remedy)


def _other_parts(first: Header) -> list[Header]:
    """Read the headers of the second and further files of a split model."""
    count = first.integer("split.count", 0, high=SPLITS_MAX)
    if count <= 1:
        return []
    paths = [first.path.with_name(name) for name in split_names(first.path.name)]
    if len(paths) != count or first.integer("split.no", 0, high=count):
        found = f"is one of {count} files of a split model, but not named so"
        remedy = f"name them NAME-00001-of-{count:05}.gguf and so on, in their order"
        raise ModelFileError(first.path, found, remedy)
    if missing := [path.name for path in paths if not path.is_file()]:
        listed = ", ".join(missing[:_LISTED_MAX])
        found = f"is part of a split model of which {len(missing)} of {count} files are missing"
        raise ModelFileError(first.path, found, f"put {listed} beside it")
    headers = [_open_header(path) for path in paths[1:]]
    for number, header in enumerate(headers, 1):
        if number != header.integer("split.no", high=SPLITS_MAX):
            found = f"is not part {number + 1} of {count}, as its name says"
            raise ModelFileError(header.path, found, "give the parts the names they were made with")
    return headers


def _describe(headers: list[Header], tensors: list[Tensor]) -> GgufFile:
    header = headers[0]
    architecture = header.text("general.architecture")
    prefix = architecture + "."
    layers = header.integer(f"{prefix}block_count", low=1, high=LAYERS_MAX)
    width = header.integer(f"{prefix}embedding_length", low=1, high=WIDTH_MAX)
    heads = header.per_layer(f"{prefix}attention.head_count", layers, 0, high=WIDTH_MAX)
    key = f"{prefix}attention.head_count_kv"
    kv_heads = header.per_layer(key, layers, max(heads), high=WIDTH_MAX)
    vocabulary = header.length("tokenizer.ggml.tokens")
    if vocabulary == 0:
        raise ModelFileError(
            header.path, "has no vocabulary", "convert the model with its tokenizer"
        )
    key = f"{prefix}attention.key_length"
    return GgufFile(
        path=header.path,
        parts=tuple(part.path for part in headers),
        version=header.version,
        architecture=architecture,
        kind=cache_kind(header),
        name=header.text("general.name"),
        quantization=_quantization(header, tensors),
        n_layers=layers,
        n_embd=width,
        n_ff=max(header.per_layer(f"{prefix}feed_forward_length", layers, 0, high=WIDTH_MAX)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_width=header.integer(key, width // max(*heads, 1), high=WIDTH_MAX),
        n_ctx_train=header.integer(f"{prefix}context_length", low=1, high=1 << 32),
        n_vocab=vocabulary,
        n_merges=header.length("tokenizer.ggml.merges"),
        n_experts=header.integer(f"{prefix}expert_count", 0, high=EXPERTS_MAX),
        n_experts_used=max(
            header.per_layer(f"{prefix}expert_used_count", layers, 0, high=EXPERTS_MAX)
        ),
        n_ff_expert=max(
            header.per_layer(f"{prefix}expert_feed_forward_length", layers, 0, high=WIDTH_MAX)
        ),
        cache=cache_shape(header, layers, width, heads, kv_heads),
        has_chat_template="tokenizer.chat_template" in header.metadata,
        tensor_count=len(tensors),
        weights_bytes=sum(tensor.size_bytes for tensor in tensors),
        tied_embedding=_tied_embedding(tensors),
        file_bytes=sum(part.file_bytes for part in headers),
        fingerprint=_fingerprint(headers),
    )


def _quantization(header: Header, tensors: list[Tensor]) -> str:
    """Return the name of a quantization: as declared, else the type most of the bytes have."""
    declared = header.metadata.get("general.file_type")
    if isinstance(declared, int) and FILE_TYPES.get(declared, ".") != ".":
        return FILE_TYPES[declared]
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0].upper()


def _tied_embedding(tensors: list[Tensor]) -> Tensor | None:
    by_name = {tensor.name: tensor for tensor in tensors}
    return None if "output.weight" in by_name else by_name.get("token_embd.weight")


def _fingerprint(headers: Sequence[Header]) -> str:
    """Return a name for the model's bytes that costs four megabytes of reading at most.

    Covers every byte of the headers, every size, and samples spread evenly over all weights. Two
    models that differ only between the samples would be taken for one; a model trained further or
    quantized otherwise differs in every sample.
    """
    digest = blake2b(digest_size=16)
    spans = [(part.path, part.data_offset, part.file_bytes - part.data_offset) for part in headers]
    for part, (_, _, size) in zip(headers, spans, strict=True):
        digest.update(part.digest + size.to_bytes(8, "little"))
    last = max(sum(size for _, _, size in spans) - SAMPLE_BYTES, 0)
    starts = sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)})
    for path, offset, size in spans:
        try:
            with path.open("rb") as file:
                for start in starts:
                    if 0 <= start < size:
                        file.seek(offset + start)
                        digest.update(file.read(min(SAMPLE_BYTES, size - start)))
        except OSError as error:
            found = f"cannot be read: {error.strerror or error}"
            raise ModelFileError(path, found, "check the disk it is on") from None
        starts = [start - size for start in starts]
    return digest.hexdigest()
