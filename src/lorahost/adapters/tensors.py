"""safetensors files with numpy alone: checked reading, conversion between float formats, writing.

Tensors are handled as bits: bfloat16 and float16 as uint16, float32 as uint32. That way padding, transposing
and copying never touch values, and bfloat16 needs no type that numpy lacks.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from lorahost.errors import AdapterRejectedError

Dtype = Literal["bfloat16", "float16", "float32"]
Bits = NDArray[Any]
"""uint16 or uint32: the bits of floats."""

MAX_HEADER_BYTES = 100_000_000
_CHUNK = 1 << 19

_NAMES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_TAGS = {name: tag for tag, name in _NAMES.items()}
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


def bits_dtype(dtype: Dtype) -> type[np.uint16] | type[np.uint32]:
    return np.uint32 if dtype == "float32" else np.uint16


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header; `start` and `end` are offsets in the file."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file whose header has been checked in full.

    Raises:
        AdapterRejectedError: truncated, or a header that lies about the data (code `corrupt_safetensors`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as f:
            self.infos = _read_header(f, path.name, self.size)
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    def bits(self, info: TensorInfo) -> tuple[Bits, Dtype]:
        """A read-only view of the tensor in its own shape, and its float format.

        Raises:
            AdapterRejectedError: the tensor isn't bfloat16, float16 or float32.
        """
        dtype = _NAMES.get(info.tag)
        if dtype is None:
            raise AdapterRejectedError(
                f"{info.name} has dtype {info.tag}; supported are {', '.join(_NAMES)}",
                code="unsupported_dtype",
            )
        kind = bits_dtype(dtype)
        count = (info.end - info.start) // np.dtype(kind).itemsize
        return np.frombuffer(self._map, kind, count, info.start).reshape(info.shape), dtype


def _read_header(f: BinaryIO, file: str, size: int) -> dict[str, TensorInfo]:
    length = int.from_bytes(f.read(8), "little") if size >= 8 else 0
    if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise _corrupt(f"{file} has {size} bytes, its header claims {length} (at most {MAX_HEADER_BYTES} are allowed)")
    try:
        header = json.loads(f.read(length), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise _corrupt(f"{file}: the header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise _corrupt(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    base = 8 + length
    infos = [_read_entry(file, name, entry, base) for name, entry in header.items()]
    position = base
    for info in sorted(infos, key=lambda i: (i.start, i.end)):
        if info.start != position:
            kind = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            raise _corrupt(f"{file}: {info.name} starts at byte {info.start}, expected {position}; it {kind}")
        position = info.end
    if position != size:
        raise _corrupt(f"{file} has {size} bytes, but its tensors end at byte {position}")
    return {info.name: info for info in infos}


def _read_entry(file: str, name: str, entry: object, base: int) -> TensorInfo:
    match entry:
        case {"dtype": str(tag), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
            type(n) is int and n >= 0 for n in (*shape, start, end)
        ):
            pass
        case _:
            raise _corrupt(f"{file}: the header entry of {name} is malformed: {entry!s:.200}")
    if tag not in _ITEM_BITS:
        raise _corrupt(f"{file}: {name} has the unknown dtype {tag!r}")
    count = 1
    for n in shape:
        count *= n
    expected = count * _ITEM_BITS[tag] // 8
    if end - start != expected:
        raise _corrupt(f"{file}: {name} {tag}{shape} needs {expected} bytes, the header gives it {end - start}")
    return TensorInfo(name, tag, tuple(shape), base + start, base + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _corrupt(message: str) -> AdapterRejectedError:
    return AdapterRejectedError(message, code="corrupt_safetensors")


def to_float32(bits: Bits, dtype: Dtype) -> NDArray[np.float32]:
    """Exact."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: NDArray[np.float32], dtype: Dtype) -> Bits:
    """Rounds to nearest, ties to even; too large values become infinite. NaN is not allowed."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    lsb = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + lsb) >> np.uint32(16)).astype(np.uint16)


def convert(bits: Bits, source: Dtype, target: Dtype, scale: float = 1.0) -> Bits:
    """`scale` times the tensor, in float32, rounded once to `target`. C-contiguous in and out, or the input."""
    if source == target and scale == 1.0:
        return bits
    flat = bits.reshape(-1)
    out = np.empty(flat.size, bits_dtype(target))
    # Chunks that fit a core's cache: several times faster than whole-array passes.
    for i in range(0, flat.size, _CHUNK):
        values = to_float32(flat[i : i + _CHUNK], source)
        if scale != 1.0:
            with np.errstate(over="ignore"):
                values = values * np.float32(scale)
        out[i : i + _CHUNK] = from_float32(values, target)
    return out.reshape(bits.shape)


def all_finite(bits: Bits, dtype: Dtype) -> bool:
    """Whether there is neither NaN nor infinity; `bits` is C-contiguous."""
    flat, infinity = bits.reshape(-1), bits.dtype.type(_INFINITY[dtype])
    magnitude = bits.dtype.type(0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    chunks = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
    return all((chunk & magnitude).max() < infinity for chunk in chunks)


def any_nonzero(bits: Bits, axis: int) -> NDArray[np.bool_]:
    """Along `axis`: whether any value differs from 0 (and -0)."""
    magnitude = bits.dtype.type(0x7FFFFFFF if bits.dtype == np.uint32 else 0x7FFF)
    joined = np.bitwise_or.reduce(bits, axis=axis)
    return np.asarray((joined & magnitude) != 0, dtype=np.bool_)


class SafetensorsWriter:
    """Writes tensors one after another; the header is filled in at the end, in space reserved by `names`.

    Args:
        path: The file to create.
        dtype: Format of every tensor.
        names: All names that may be written, for the size of the header.
    """

    def __init__(self, path: Path, dtype: Dtype, names: Iterable[str]) -> None:
        # 150 bytes cover an entry's punctuation, dtype, shape and offsets.
        self._room = (sum(len(json.dumps(n)) + 150 for n in names) + 256) // 8 * 8
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._dtype: Dtype = dtype
        self._offset = 0
        self._file = path.open("wb")
        self._file.seek(8 + self._room)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                header = json.dumps(self._entries, separators=(",", ":")).encode()
                if len(header) > self._room:
                    raise RuntimeError(f"header of {len(header)} bytes in room for {self._room}")
                self._file.seek(0)
                self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))

    @property
    def bytes_written(self) -> int:
        """Size of the tensors so far."""
        return self._offset

    def write(self, name: str, bits: Bits) -> None:
        """Appends one tensor."""
        self._append([name], bits.shape, bits)

    def write_each(self, names: list[str], bits: Bits) -> None:
        """Appends bits[i] under names[i], all in one go."""
        self._append(names, bits.shape[1:], bits)

    def _append(self, names: list[str], shape: tuple[int, ...], bits: Bits) -> None:
        if bits.dtype != bits_dtype(self._dtype):
            raise TypeError(f"{bits.dtype} bits in a file of {self._dtype}")
        step = bits.nbytes // len(names)
        for name in names:
            offsets = [self._offset, self._offset + step]
            self._entries[name] = {"dtype": _TAGS[self._dtype], "shape": shape, "data_offsets": offsets}
            self._offset += step
        self._file.write(np.ascontiguousarray(bits).data)
