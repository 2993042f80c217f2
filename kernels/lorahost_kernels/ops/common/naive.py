"""Torch references, in the precision of `compute`, that the kernels are held against; slow and plain."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorahost_kernels.ops.common.routing import Routing, pair_keys


def shrink(x: Tensor, lora_a: Sequence[Tensor], routing: Routing, rows_are_pairs: bool, compute: torch.dtype) -> Tensor:
    """(1, pairs, slices, r): x row of each pair times A of its slot and expert; zero where there is no work."""
    keys = pair_keys(routing, lora_a[0].shape[0])
    rank = lora_a[0].shape[2]
    h = torch.zeros(routing.num_pairs, len(lora_a), rank, dtype=compute, device=x.device)
    for key in keys.unique().tolist():
        if key < 0:
            continue
        pairs = (keys == key).nonzero().flatten()
        own = pairs if routing.pair_rows is None else routing.pair_rows[pairs].long()
        rows = x[own if rows_are_pairs else pairs // routing.topk].to(compute)
        for i, a in enumerate(lora_a):
            weights = a[key // routing.num_experts, min(key % routing.num_experts, a.shape[1] - 1)]
            h[pairs, i] = rows @ weights.to(compute).T
    return h.unsqueeze(0)


def expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int],
    add_inputs: bool,
    compute: torch.dtype,
) -> None:
    """y[pair, column_i : column_i + n_i] (+)= weight * h[pair, i] @ B_i^T, in place, for pairs with work."""
    keys = pair_keys(routing, lora_b[0].shape[0])
    total = h.to(compute).sum(0)
    for key in keys.unique().tolist():
        if key < 0:
            continue
        pairs = (keys == key).nonzero().flatten()
        for i, (b, column) in enumerate(zip(lora_b, columns, strict=True)):
            weights = b[key // routing.num_experts, min(key % routing.num_experts, b.shape[1] - 1)]
            delta = total[pairs, i] @ weights.to(compute).T
            if routing.topk_weights is not None:
                delta = delta * routing.topk_weights.reshape(-1)[pairs].to(compute)[:, None]
            span = slice(column, column + b.shape[2])
            if y.dim() == 3:
                tokens, ks = pairs // routing.topk, pairs % routing.topk
                base = y[tokens, ks, span].to(compute) if add_inputs else 0
                y[tokens, ks, span] = (base + delta).to(y.dtype)
            else:
                rows = pairs if routing.pair_rows is None else routing.pair_rows[pairs].long()
                base = y[rows, span].to(compute) if add_inputs else 0
                y[rows, span] = (base + delta).to(y.dtype)
