"""LoRA deltas for rows that each have a slot (adapter) and, for experts, an expert; plain torch, fp32 sums."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import torch

# Above this many gathered weights (elements) rows are grouped by weights instead of gathering weights by row.
GATHER_LIMIT = 131_072


def shrink(
    x: torch.Tensor, lora_a: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor | None = None
) -> torch.Tensor:
    """Per row, A of its slot (and expert) times the row.

    Args:
        x: `(rows, in)`, any float dtype.
        lora_a: `(slots, experts, rank, in)`; the expert dimension is 1 where all experts share the factor.
        slots: `(rows,)` int64, all >= 0.
        experts: `(rows,)` int64, or None for a module without experts.

    Returns:
        `(rows, rank)` fp32.
    """
    return _rows_times_weights(x, lora_a, slots, experts)


def expand(
    y: torch.Tensor,
    rows: torch.Tensor,
    h: torch.Tensor,
    lora_b: torch.Tensor,
    slots: torch.Tensor,
    experts: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """Adds B times `h` to columns `offset` and up of the given rows of `y`, in place; other rows stay as they are.

    Args:
        y: `(all rows, columns)`, any float dtype.
        rows: `(rows,)` int64, distinct: the rows of `y` that `h`, `slots` and `experts` belong to.
        h: `(rows, rank)` fp32, from `shrink`.
        lora_b: `(slots, experts, out, rank)`; `out` beyond y's last column is padding and is ignored.
        slots: `(rows,)` int64, all >= 0.
        experts: `(rows,)` int64, or None for a module without experts.
        offset: First column.
    """
    delta = _rows_times_weights(h, lora_b, slots, experts)
    columns = y[:, offset : offset + delta.shape[1]]
    delta = delta[:, : columns.shape[1]]
    columns[rows] = (columns[rows].float() + delta).to(y.dtype)


def _rows_times_weights(
    x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor | None
) -> torch.Tensor:
    """`(rows, k)` times `(slots, experts, n, k)`, by row: `(rows, n)` fp32."""
    x = x.float()
    count = weights.shape[1]
    key = slots * count
    if experts is not None and count > 1:
        key = key + experts
    by_key = weights.flatten(0, 1)
    if x.shape[0] * by_key[0].numel() <= GATHER_LIMIT:
        return torch.bmm(by_key[key].float(), x.unsqueeze(-1)).squeeze(-1)
    out = x.new_empty(x.shape[0], weights.shape[2])
    order = key.argsort()
    keys, sizes = key[order].unique_consecutive(return_counts=True)
    for group, rows in zip(keys.tolist(), order.split(sizes.tolist()), strict=True):
        out[rows] = x[rows] @ by_key[group].float().T
    return out
