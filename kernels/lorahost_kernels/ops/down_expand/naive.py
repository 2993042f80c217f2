"""Torch reference of down_expand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorahost_kernels.configs import ExpandConfig
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing, in_token_order, slice_columns


def down_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: ExpandConfig | None = None,
    compute: torch.dtype = torch.float64,
) -> None:
    """As the launcher, computed in `compute` and rounded once into y."""
    naive.expand(y, h, lora_b, in_token_order(routing), columns or slice_columns(lora_b), add_inputs, compute)
