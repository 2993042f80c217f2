"""Launcher of expand."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig
from lorahost_kernels.ops.common.launch import run_expand
from lorahost_kernels.ops.common.routing import Routing, slice_columns
from lorahost_kernels.ops.expand.kernel import expand_kernel


def expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: ExpandConfig | None = None,
) -> None:
    """y (tokens, columns) += h times lora_b: a tensor (slots, 1, n, r) for each slice of a dense layer.

    y changes in place, only in rows with LoRA work; slice i starts at columns[i], by default right after slice i - 1.
    """
    run_expand(expand_kernel, "expand", y, h, lora_b, routing, columns or slice_columns(lora_b), add_inputs, config)
