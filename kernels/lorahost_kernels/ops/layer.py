"""The LoRA product of one layer: shrink then expand, two launches chained by programmatic dependent launch.

The expand can take over the step behind it: the activation, or for few pairs the sum over a token's experts.
"""

from collections.abc import Sequence

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.down_expand.launch import down_expand
from lorahost_kernels.ops.down_shrink.launch import down_shrink
from lorahost_kernels.ops.expand.launch import expand
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.expand_topk_sum.launch import expand_topk_sum
from lorahost_kernels.ops.gate_up_expand.launch import gate_up_expand
from lorahost_kernels.ops.gate_up_shrink.launch import gate_up_shrink
from lorahost_kernels.ops.shrink.launch import shrink

Configs = tuple[ShrinkConfig, ExpandConfig]


def gate_up(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    configs: Configs | None = None,
) -> None:
    """y (tokens, topk, columns) += B A x of each pair; rows without LoRA work stay as they are, bit for bit.

    With routing.pair_rows y is (pairs, columns), and pair i has row pair_rows[i].
    """
    shrink_config, expand_config = configs or (None, None)
    h = gate_up_shrink(x, lora_a, routing, shrink_config)
    gate_up_expand(y, h, lora_b, routing, columns, add_inputs, expand_config)


def down(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    configs: Configs | None = None,
) -> None:
    """y (tokens, topk, hidden) += topk_weight * B A x of each pair; x holds a row for each pair (pair_rows)."""
    shrink_config, expand_config = configs or (None, None)
    h = down_shrink(x, lora_a, routing, shrink_config)
    down_expand(y, h, lora_b, routing, columns, add_inputs, expand_config)


def linear(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int] | None = None,
    add_inputs: bool = True,
    configs: Configs | None = None,
) -> None:
    """y (tokens, columns) += B A x of each token, for the slices of a dense layer."""
    shrink_config, expand_config = configs or (None, None)
    h = shrink(x, lora_a, routing, shrink_config)
    expand(y, h, lora_b, routing, columns, add_inputs, expand_config)


def gate_up_swiglu(
    out: Tensor,
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    routing: Routing,
    alpha: float,
    limit: float,
    configs: Configs | None = None,
) -> None:
    """out (pairs, n) = swiglu(y + B A x), for all pairs, and y stays as it is; see `expand_swiglu`."""
    shrink_config, expand_config = configs or (None, None)
    h = gate_up_shrink(x, (lora_a,), routing, shrink_config)
    expand_swiglu(out, y, h, lora_b, routing, alpha, limit, config=expand_config)


def down_topk_sum(
    out: Tensor,
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    routing: Routing,
    configs: Configs | None = None,
) -> None:
    """out (tokens, hidden) = the sum over experts of y + topk_weight * B A x; see `expand_topk_sum`.

    For batches without a work list.
    """
    shrink_config, expand_config = configs or (None, None)
    h = down_shrink(x, (lora_a,), routing, shrink_config)
    expand_topk_sum(out, y, h, lora_b, routing, config=expand_config)
