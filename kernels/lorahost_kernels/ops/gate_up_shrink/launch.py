"""Launcher of gate_up_shrink."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ShrinkConfig
from lorahost_kernels.ops.common.launch import run_shrink
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.gate_up_shrink.kernel import gate_up_shrink_kernel


def gate_up_shrink(x: Tensor, lora_a: Sequence[Tensor], routing: Routing, config: ShrinkConfig | None = None) -> Tensor:
    """x (tokens, hidden) times lora_a: 1 or 2 tensors (slots, experts, r, hidden).

    Returns fp32 partial sums (splits, pairs, slices, r); rows without LoRA work are not written.
    """
    return run_shrink(gate_up_shrink_kernel, "gate_up_shrink", x, lora_a, routing, False, config)
