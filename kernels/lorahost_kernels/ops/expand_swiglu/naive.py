"""Torch reference of expand_swiglu."""

import torch
from torch import Tensor

from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing, unweighted


def expand_swiglu(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float,
    compute: torch.dtype = torch.float64,
) -> None:  # fmt: skip
    """As the launcher, computed in `compute` and rounded once into out; y stays as it is."""
    total = y.to(compute, copy=True)
    naive.expand(total, h, (lora_b,), unweighted(routing), (0,), True, compute)
    gate, up = total[:, ::2].clamp(max=limit), total[:, 1::2].clamp(-limit, limit)
    rows = routing.pair_rows
    assert rows is not None
    rows = rows[rows >= 0].long()
    out[rows] = (gate * torch.sigmoid(alpha * gate) * (up + 1))[rows].to(out.dtype)
