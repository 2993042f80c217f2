"""Work lists of the dense layers, made on the host once a step: every layer of a step has the same rows.

One buffer on the device holds the rows with an adapter, sorted by slot, and a tile table for each tile height that the
kernels may ask for. CUDA graphs read it at its fixed address.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from lorahost_kernels.configs import cdiv, max_tiles
from lorahost_kernels.ops.common.routing import WorkList

HEIGHTS = (16, 32, 64)
Ints = NDArray[np.int64]


@functools.cache
def layout(max_tokens: int, slots: int) -> dict[int, tuple[int, int]]:
    """(first element, entries a column) of the table of each tile height, behind `max_tokens` rows."""
    tables: dict[int, tuple[int, int]] = {}
    start = cdiv(max_tokens, 4) * 4
    for height in HEIGHTS:
        entries = max_tiles(max_tokens, slots, height)
        tables[height] = (start, entries)
        start = cdiv(start + 1 + 3 * entries, 4) * 4
    return tables


def buffer_size(max_tokens: int, slots: int) -> int:
    """int32 elements of the buffer."""
    start, entries = layout(max_tokens, slots)[HEIGHTS[-1]]
    return start + 1 + 3 * entries


def fill(buffer: NDArray[np.int32], order: Ints, slot_ids: Ints, counts: Ints, max_tokens: int, slots: int) -> None:
    """Writes rows and tables. order: rows with an adapter sorted by slot; counts: rows of each of slot_ids."""
    buffer[: order.size] = order
    first = np.cumsum(counts) - counts
    for height, (start, entries) in layout(max_tokens, slots).items():
        tiles = -(-counts // height)
        total = int(tiles.sum())
        within = (np.arange(total) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * height
        buffer[start] = total
        columns = buffer[start + 1 : start + 1 + 3 * entries].reshape(3, entries)
        columns[0, :total] = np.repeat(slot_ids, tiles)
        columns[1, :total] = np.repeat(first, tiles) + within
        columns[2, :total] = np.minimum(np.repeat(counts, tiles) - within, height)


def work_list(buffer: torch.Tensor, tokens: int, max_tokens: int, slots: int, height: int) -> WorkList | None:
    """The list of this step's batch for tiles of `height` rows; None where the buffer has no such table."""
    table = layout(max_tokens, slots).get(height)
    if table is None:
        return None
    start, entries = table
    rows, tiles = buffer[:max_tokens], buffer[start : start + 1 + 3 * entries]
    return WorkList(rows, tiles, max_tiles(tokens, slots, height), height, entries)
