"""Torch reference of down."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorahost_kernels.configs import OpConfig
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.down_expand import naive as expand_naive
from lorahost_kernels.ops.down_shrink import naive as shrink_naive


def down(
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
    """down_shrink then down_expand, computed in `compute` and rounded once into y."""
    h = shrink_naive.down_shrink(x, lora_a, routing, compute=compute)
    expand_naive.down_expand(y, h, lora_b, routing, columns, add_inputs, compute=compute)
