"""Launcher of down_expand."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig
from lorahost_kernels.ops.common.launch import run_expand
from lorahost_kernels.ops.common.routing import Routing, in_token_order, slice_columns
from lorahost_kernels.ops.down_expand.kernel import down_expand_kernel


def down_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: ExpandConfig | None = None,
) -> None:
    """y (tokens, topk, hidden) += topk_weight * h times lora_b[0] (slots, experts, hidden, r).

    y changes in place, only in rows with LoRA work; slice i starts at columns[i], by default right after slice i - 1.
    """
    columns = columns or slice_columns(lora_b)
    run_expand(down_expand_kernel, "down_expand", y, h, lora_b, in_token_order(routing), columns, add_inputs, config)
