"""Launcher of down_shrink."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ShrinkConfig
from lorahost_kernels.ops.common.launch import run_shrink
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.down_shrink.kernel import down_shrink_kernel


def down_shrink(x: Tensor, lora_a: Sequence[Tensor], routing: Routing, config: ShrinkConfig | None = None) -> Tensor:
    """x (tokens * topk, intermediate), the activation output, times lora_a[0] (slots, experts, r, intermediate).

    With routing.pair_rows the row of pair i is pair_rows[i].

    Returns fp32 partial sums (splits, pairs, slices, r); rows without LoRA work are not written.
    """
    return run_shrink(down_shrink_kernel, "down_shrink", x, lora_a, routing, True, config)
