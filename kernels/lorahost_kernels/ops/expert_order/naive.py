"""Torch reference of expert_order."""

import torch
from torch import Tensor

from lorahost_kernels.ops.expert_order.launch import ExpertOrder, count_tiles


def expert_order(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int, block_m: int, dtype: torch.dtype
) -> ExpertOrder:
    """As the launcher, for any number of pairs."""
    ids = topk_ids.reshape(-1).long()
    routed = (ids >= 0) & (ids < num_experts)
    pairs = torch.argsort(torch.where(routed, ids, num_experts), stable=True)[: int(routed.sum())]
    rows = torch.bincount(ids[routed], minlength=num_experts)
    tiles = (rows + block_m - 1) // block_m
    row_pairs = torch.full((ids.numel(),), -1, dtype=torch.int64)
    row_pairs[: len(pairs)] = pairs
    pair_rows = torch.full_like(row_pairs, -1)
    pair_rows[pairs] = torch.arange(len(pairs))
    weights = torch.zeros(ids.numel(), dtype=dtype)
    weights[: len(pairs)] = topk_weights.reshape(-1)[pairs].to(dtype)
    tile_map = torch.full((max(count_tiles(ids.numel(), num_experts, block_m), 1),), -1, dtype=torch.int64)
    entries = [(tile << 16) + e for e in range(num_experts) for tile in range(int(tiles[e]))]
    tile_map[: len(entries)] = torch.tensor(entries, dtype=torch.int64)
    tables = (rows, starts(rows), starts(tiles), tile_map, row_pairs, pair_rows)
    a, b, c, d, e, f = (t.to(torch.int32) for t in tables)
    return ExpertOrder(a, b, c, d, e, f, weights, block_m)


def starts(counts: Tensor) -> Tensor:
    """Exclusive sums, with the total at the end."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
