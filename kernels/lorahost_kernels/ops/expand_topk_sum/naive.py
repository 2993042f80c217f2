"""Torch reference of expand_topk_sum."""

import torch
from torch import Tensor

from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing, in_token_order


def expand_topk_sum(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, compute: torch.dtype = torch.float64
) -> None:
    """As the launcher, computed in `compute` and rounded once into out."""
    assert routing.topk_ids is not None
    total = torch.where((routing.topk_ids >= 0)[:, :, None], y.to(compute), 0)
    naive.expand(total, h, (lora_b,), in_token_order(routing), (0,), True, compute)
    out.copy_(total.sum(1).to(out.dtype))
