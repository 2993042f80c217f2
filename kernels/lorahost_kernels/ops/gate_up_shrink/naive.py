"""Torch reference of gate_up_shrink."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorahost_kernels.configs import ShrinkConfig
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing


def gate_up_shrink(
    x: Tensor,
    lora_a: Sequence[Tensor],
    routing: Routing,
    config: ShrinkConfig | None = None,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """As the launcher, in one part: (1, pairs, slices, r) of dtype `compute`, zero where there is no work."""
    return naive.shrink(x, lora_a, routing, rows_are_pairs=False, compute=compute)
