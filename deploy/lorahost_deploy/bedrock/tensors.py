"""Base models' tensors: MXFP4 as floats, and safetensors files of several formats, written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# E2M1: a sign, two bits of exponent, one of mantissa; the low half of a byte comes first
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE_BIAS = 127


def from_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    """Exact values of MXFP4.

    Args:
        blocks: (..., blocks, 16) uint8, two values a byte.
        scales: (..., blocks) uint8, powers of two with a bias of 127.

    Returns:
        (..., blocks * 32) float32.
    """
    values = FP4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*blocks.shape[:-1], -1)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - SCALE_BIAS)
    return scaled.reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: safetensors' tag, shape and size in bytes."""

    name: str
    tag: str
    shape: tuple[int, ...]
    size: int


def write(path: Path, entries: list[Entry], pieces: Iterable[Iterable[NDArray[Any]]]) -> None:
    """Writes a safetensors file; `pieces` gives each entry's data in order, in pieces that follow each other.

    Raises:
        ValueError: the pieces are not as long as the entry says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.size]
        header[entry.name] = {"dtype": entry.tag, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, parts in zip(entries, pieces, strict=True):
            size = sum(file.write(np.ascontiguousarray(part).data) for part in parts)
            if size != entry.size:
                raise ValueError(f"{entry.name} has {size} bytes, expected {entry.size}")
