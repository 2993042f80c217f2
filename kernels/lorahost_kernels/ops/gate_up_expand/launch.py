"""Launcher of gate_up_expand."""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig
from lorahost_kernels.ops.common.launch import run_expand
from lorahost_kernels.ops.common.routing import Routing, slice_columns, unweighted
from lorahost_kernels.ops.gate_up_expand.kernel import gate_up_expand_kernel


def gate_up_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    config: ExpandConfig | None = None,
) -> None:
    """y (tokens, topk, columns) += h times lora_b: 1 or 2 tensors (slots, experts, n, r); weights are not applied.

    With routing.pair_rows y is (pairs, columns) and pair i has row pair_rows[i].

    y changes in place, only in rows with LoRA work; slice i starts at columns[i], by default right after slice i - 1.
    """
    run_expand(
        gate_up_expand_kernel,
        "gate_up_expand",
        y,
        h,
        lora_b,
        unweighted(routing),
        columns or slice_columns(lora_b),
        add_inputs,
        config,
    )
