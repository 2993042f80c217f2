"""Launcher of gate_up: the whole LoRA product of a layer, in one launch or in two."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import OpConfig
from lorahost_kernels.ops.common.launch import default_for, run_fused
from lorahost_kernels.ops.common.routing import Routing, slice_columns, unweighted
from lorahost_kernels.ops.gate_up.kernel import gate_up_kernel
from lorahost_kernels.ops.gate_up_expand.launch import gate_up_expand
from lorahost_kernels.ops.gate_up_shrink.launch import gate_up_shrink


def gate_up(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: OpConfig | None = None,
) -> None:
    """gate_up_shrink then gate_up_expand: y changes in place, only in rows with LoRA work."""
    config = config or default_for(routing, lora_a[0], lora_b[0])
    columns = columns or slice_columns(lora_b)
    if config.fused:
        run_fused(
            gate_up_kernel, y, x, lora_a, lora_b, unweighted(routing), columns, False, add_inputs, config
        )
    else:
        h = gate_up_shrink(x, lora_a, routing, config.shrink)
        gate_up_expand(y, h, lora_b, routing, columns, add_inputs, config.expand)
