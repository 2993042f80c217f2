"""Launcher of shrink."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ShrinkConfig
from lorahost_kernels.ops.common.launch import run_shrink
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.shrink.kernel import shrink_kernel


def shrink(x: Tensor, lora_a: Sequence[Tensor], routing: Routing, config: ShrinkConfig | None = None) -> Tensor:
    """x (tokens, in) times lora_a: a tensor (slots, 1, r, in) for each slice of a dense layer.

    Returns fp32 partial sums (splits, pairs, slices, r); rows without LoRA work are not written.
    """
    return run_shrink(shrink_kernel, "shrink", x, lora_a, routing, False, config)
