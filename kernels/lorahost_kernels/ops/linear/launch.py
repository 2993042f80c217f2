"""Launcher of linear: the whole LoRA product of a layer, in one launch or in two."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import OpConfig
from lorahost_kernels.ops.common.launch import default_for, run_fused
from lorahost_kernels.ops.common.routing import Routing, slice_columns
from lorahost_kernels.ops.expand.launch import expand
from lorahost_kernels.ops.linear.kernel import linear_kernel
from lorahost_kernels.ops.shrink.launch import shrink


def linear(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: OpConfig | None = None,
) -> None:
    """shrink then expand: y changes in place, only in rows with LoRA work."""
    config = config or default_for(routing, lora_a[0], lora_b[0])
    columns = columns or slice_columns(lora_b)
    if config.fused:
        run_fused(linear_kernel, y, x, lora_a, lora_b, routing, columns, False, add_inputs, config)
    else:
        h = shrink(x, lora_a, routing, config.shrink)
        expand(y, h, lora_b, routing, columns, add_inputs, config.expand)
