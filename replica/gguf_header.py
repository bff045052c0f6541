"""Read what stands before the weights of one GGUF file: its metadata and its list of tensors.

Knows the format (docs/gguf.md in ggml-org/ggml), not what a model is. Nothing in the file is
believed: every count and length has a limit, so that a damaged or hostile file costs a bounded
amount of memory and time, and is refused in one sentence. As strict as llama.cpp's own reader
(ggml/src/gguf.cpp), which it has to satisfy later.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NoReturn

from replica.llama_cpp_tables import TENSOR_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32

HEADER_BYTES_MAX = 256 << 20
"""The largest vocabularies of today make headers of 20 MiB."""
KEYS_MAX = 65_536
TENSORS_MAX = 65_536
STRINGS_MAX = 4_000_000
"""In all arrays of a file together: tokens, merges and the like."""
KEPT_ELEMENTS_MAX = 1_024
"""Arrays up to this long are kept (one number per layer); of longer ones only the length is."""
DIMENSIONS_MAX = 4
TENSOR_NAME_BYTES_MAX = 63
TENSOR_BYTES_MAX = 1 << 46
ALIGNMENT_MAX = 1 << 20

_READ_BYTES = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY = struct.Struct("<IQ")
_STRING_TYPE = 8
_ARRAY_TYPE = 9
_SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
    }.items()
}  # fmt: skip

DAMAGED = "it is truncated or damaged, so download or copy it again"


class ModelFileError(Exception):
    """A file that cannot be served. The message is one sentence: which file, what, the remedy."""

    def __init__(self, path: Path, found: str, remedy: str) -> None:
        super().__init__(f"{path} {found}; {remedy}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Elements:
    """An array in the metadata of which only the length was kept."""

    count: int


Value = int | float | bool | str | tuple[int | float | bool, ...] | Elements


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """The row length first, as ggml counts."""
    type_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the weights of one file."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int
    """Where in the file the weights begin."""
    file_bytes: int
    """The size the file needs to have; it is at least that large."""
    digest: bytes
    """Of the header's bytes."""

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int) -> int:
        """Return a number of the metadata that has to lie between `low` and `high`."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(self.path, f"has no {key} in its metadata", DAMAGED)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            found = f"has {key} = {value}, which should be a number from {low} to {high}"
            raise ModelFileError(self.path, found, DAMAGED)
        return value

    def per_layer(self, key: str, layers: int, default: int, *, high: int) -> tuple[int, ...]:
        """Return a number that the metadata gives either once or for every layer."""
        value = self.metadata.get(key)
        if not isinstance(value, tuple):
            return (self.integer(key, default, high=high),) * layers
        if len(value) < layers or not all(
            isinstance(number, int) and 0 <= number <= high for number in value
        ):
            found = f"has a {key} that does not give each of {layers} layers a number up to {high}"
            raise ModelFileError(self.path, found, DAMAGED)
        return tuple(int(number) for number in value[:layers])

    def text(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default

    def length(self, key: str) -> int:
        """Return how many elements an array has; 0 without such an array."""
        value = self.metadata.get(key)
        if isinstance(value, Elements):
            return value.count
        return len(value) if isinstance(value, tuple) else 0


def read_header(path: Path) -> Header:
    """Read the header of one file that begins with the magic; raises `ModelFileError`."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        reader = _Reader(path, file, size)
        version = _read_version(reader)
        tensor_count = reader.count(TENSORS_MAX, "tensors")
        key_count = reader.count(KEYS_MAX, "metadata keys")
        metadata = _read_metadata(reader, key_count)
        alignment = _alignment(path, metadata)
        tensors, data_bytes = _read_tensors(reader, tensor_count, alignment)
        end = reader.position
        data_offset = _padded(end, alignment) if tensors else end
    if data_offset + data_bytes > size:
        found = (
            f"has {size:,} of the {data_offset + data_bytes:,} bytes that its {len(tensors)} "
            "tensors need"
        )
        raise ModelFileError(path, found, "the download or copy is incomplete, so repeat it")
    return Header(
        path, version, metadata, tensors, data_offset, data_offset + data_bytes, reader.digest(end)
    )


class _Reader:
    """The header's bytes, read as far as they are needed."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._size = size
        self._data = b""
        self._strings_left = STRINGS_MAX

    def refuse(self, found: str) -> NoReturn:
        raise ModelFileError(self.path, found, DAMAGED)

    def digest(self, end: int) -> bytes:
        return blake2b(memoryview(self._data)[:end], digest_size=32).digest()

    def _need(self, count: int) -> None:
        """Have the next `count` bytes in memory."""
        end = self.position + count
        if end <= len(self._data):
            return
        if end > self._size:
            self.refuse(
                f"ends after {self._size:,} bytes, inside its header, which asks for "
                f"{count:,} bytes at {self.position:,}"
            )
        if end > HEADER_BYTES_MAX:
            self.refuse(f"has a header of more than {HEADER_BYTES_MAX >> 20} MiB")
        self._data += self._file.read(max(end - len(self._data), len(self._data), _READ_BYTES))
        if end > len(self._data):
            self.refuse("became shorter while it was read")

    def number(self, layout: struct.Struct) -> int | float | bool:
        self._need(layout.size)
        value: int | float | bool = layout.unpack_from(self._data, self.position)[0]
        self.position += layout.size
        return value

    def whole(self, layout: struct.Struct) -> int:
        return int(self.number(layout))

    def count(self, limit: int, what: str) -> int:
        value = self.whole(_U64)
        if value > limit:
            self.refuse(f"claims to have {value:,} {what}, where {limit:,} is the limit")
        return value

    def string(self) -> str:
        size = self.whole(_U64)
        self._need(size)
        text = self._data[self.position : self.position + size].decode("utf-8", "replace")
        self.position += size
        return text

    def array(self) -> Value:
        self._need(_ARRAY.size)
        kind, count = _ARRAY.unpack_from(self._data, self.position)
        self.position += _ARRAY.size
        if kind == _STRING_TYPE:
            self._skip_strings(count)
            return Elements(count)
        if kind not in _SCALARS:
            self.refuse(f"has an array of the unknown type {kind} in its metadata")
        layout = _SCALARS[kind]
        self._need(count * layout.size)
        start, self.position = self.position, self.position + count * layout.size
        if count > KEPT_ELEMENTS_MAX:
            return Elements(count)
        return tuple(value for (value,) in layout.iter_unpack(self._data[start : self.position]))

    def _skip_strings(self, count: int) -> None:
        """Pass over an array of strings: half a million of them in a tenth of a second."""
        self._strings_left -= count
        if self._strings_left < 0:
            self.refuse(f"claims to have more than {STRINGS_MAX:,} strings in its metadata")
        unpack = _U64.unpack_from
        for _ in range(count):
            if self.position + _U64.size > len(self._data):
                self._need(_U64.size)
            self.position += _U64.size + unpack(self._data, self.position)[0]
        self._need(0)


def _read_version(reader: _Reader) -> int:
    magic = reader.whole(_U32).to_bytes(4, "little")
    assert magic == MAGIC, "the caller has looked"
    version = reader.whole(_U32)
    if version & 0xFFFF == 0 and version != 0:
        found = "was written for big-endian machines"
        raise ModelFileError(reader.path, found, "get the little-endian file of this model")
    if version not in VERSIONS:
        found = f"is GGUF version {version}, and llama.cpp reads 2 and 3"
        remedy = "get or convert a newer file" if version < min(VERSIONS) else DAMAGED
        raise ModelFileError(reader.path, found, remedy)
    return version


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = reader.string()
        kind = reader.whole(_U32)
        if not key or key in metadata:
            reader.refuse(f"has the metadata key {key[:64]!r} twice, or without a name")
        if kind == _STRING_TYPE:
            metadata[key] = reader.string()
        elif kind == _ARRAY_TYPE:
            metadata[key] = reader.array()
        elif kind in _SCALARS:
            metadata[key] = reader.number(_SCALARS[kind])
        else:
            reader.refuse(f"gives the metadata key {key[:64]!r} the unknown type {kind}")
    return metadata


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    if not isinstance(value, int) or not 0 < value <= ALIGNMENT_MAX or value & (value - 1):
        raise ModelFileError(path, f"has general.alignment = {value}, not a power of 2", DAMAGED)
    return value


def _read_tensors(reader: _Reader, count: int, alignment: int) -> tuple[tuple[Tensor, ...], int]:
    """Return the tensors, and how many bytes of the file hold their data."""
    tensors: dict[str, Tensor] = {}
    expected = end = 0
    for _ in range(count):
        tensor = _read_tensor(reader)
        if tensor.name in tensors:
            reader.refuse(f"has two tensors named {tensor.name!r}")
        tensors[tensor.name] = tensor
        offset = reader.whole(_U64)
        if offset != expected:
            found = f"has its tensor {tensor.name!r} at {offset:,}, where {expected:,} is expected"
            reader.refuse(found)
        end = offset + tensor.size_bytes
        expected = _padded(end, alignment)
    return tuple(tensors.values()), end


def _read_tensor(reader: _Reader) -> Tensor:
    """Read one entry of the list of tensors, up to its offset."""
    name = reader.string()
    dimensions = reader.whole(_U32)
    if len(name.encode()) > TENSOR_NAME_BYTES_MAX or dimensions > DIMENSIONS_MAX:
        reader.refuse(
            f"has a tensor {name[:TENSOR_NAME_BYTES_MAX]!r} of {dimensions} dimensions, where "
            f"names have {TENSOR_NAME_BYTES_MAX} bytes and tensors {DIMENSIONS_MAX} dimensions"
        )
    shape = tuple(reader.whole(_U64) for _ in range(dimensions))
    number = reader.whole(_U32)
    if number not in TENSOR_TYPES:
        found = f"has a tensor {name!r} of type {number}, which this llama.cpp does not have"
        raise ModelFileError(reader.path, found, "get the model in another quantization")
    type_name, block, block_bytes = TENSOR_TYPES[number]
    elements = 1
    for length in shape:
        elements *= length
    size = elements // block * block_bytes
    if (shape[0] if shape else 1) % block or size > TENSOR_BYTES_MAX:
        reader.refuse(f"has a tensor {name!r} of impossible shape {shape} for {type_name}")
    return Tensor(name, shape, type_name, size)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
