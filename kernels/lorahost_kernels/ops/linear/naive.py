"""Torch reference of linear."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorahost_kernels.configs import OpConfig
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.expand import naive as expand_naive
from lorahost_kernels.ops.shrink import naive as shrink_naive


def linear(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: OpConfig | None = None,
    compute: torch.dtype = torch.float64,
) -> None:
    """shrink then expand, computed in `compute` and rounded once into y."""
    h = shrink_naive.shrink(x, lora_a, routing, compute=compute)
    expand_naive.expand(y, h, lora_b, routing, columns, add_inputs, compute=compute)
