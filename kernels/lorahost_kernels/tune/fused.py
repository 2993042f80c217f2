"""The products of experts whose expands take over the step behind them, as a GPT-OSS engine runs them.

Gate and up are one tensor, the pairs' rows are in the order of their experts. gate_up ends in the activation. down ends
in the sum over a token's experts: in one launch without a work list, in a launch behind the expand with one.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.down_expand.launch import down_expand
from lorahost_kernels.ops.expand_swiglu import naive as naive_swiglu
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.expand_topk_sum import naive as naive_topk_sum
from lorahost_kernels.ops.expand_topk_sum.launch import expand_topk_sum

ALPHA, LIMIT = 1.702, 7.0  # of GPT-OSS's activation
Weights = Sequence[Tensor]
Configs = tuple[ShrinkConfig, ExpandConfig]


def by_expert(routing: Routing) -> Routing:
    """The routing with each pair's row in the order of the experts; pairs of expert -1 have none."""
    assert routing.topk_ids is not None
    experts = routing.topk_ids.flatten()
    order = torch.where(experts < 0, routing.num_experts, experts).argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return replace(routing, pair_rows=torch.where(experts < 0, -1, rows).to(torch.int32))


def gate_up(
    out: Tensor, y: Tensor, x: Tensor, lora_a: Weights, lora_b: Weights, routing: Routing,
    configs: Configs | None = None,
) -> None:  # fmt: skip
    """out (pairs, n) = the activation of y (pairs, 2n) + B A x (tokens, hidden)."""
    layer.gate_up_swiglu(out, y, x, lora_a[0], lora_b[0], routing, ALPHA, LIMIT, configs)


def gate_up_expand(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Weights, routing: Routing, config: ExpandConfig | None = None
) -> None:
    """The second launch of `gate_up`."""
    expand_swiglu(out, y, h, lora_b[0], routing, ALPHA, LIMIT, config=config)


def down(
    out: Tensor, y: Tensor, x: Tensor, lora_a: Weights, lora_b: Weights, routing: Routing,
    configs: Configs | None = None,
) -> None:  # fmt: skip
    """out (tokens, hidden) = the sum over experts of y (tokens, topk, hidden) + topk_weight * B A x (pairs, n).

    torch's sum stands for vLLM's masked_moe_sum, which reads and writes the same bytes; with a list y changes.
    """
    if routing.work is None:
        layer.down_topk_sum(out, y, x, lora_a[0], lora_b[0], routing, configs)
        return
    layer.down(y, x, lora_a, lora_b, routing, configs=configs)
    torch.sum(y, 1, out=out)


def down_last(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Weights, routing: Routing, config: ExpandConfig | None = None
) -> None:
    """What follows the shrink of `down`."""
    if routing.work is None:
        expand_topk_sum(out, y, h, lora_b[0], routing, config=config)
        return
    down_expand(y, h, lora_b, routing, config=config)
    torch.sum(y, 1, out=out)


def reference(
    y: Tensor, x: Tensor, lora_a: Weights, lora_b: Weights, routing: Routing, half: str, compute: torch.dtype
) -> Tensor:
    """What `gate_up` or `down` makes of its out of zeros."""
    h = naive.shrink(x, lora_a, routing, half == "down", compute)
    if half == "down":
        out = torch.zeros(y.shape[0], y.shape[2], dtype=compute, device=y.device)
        naive_topk_sum.expand_topk_sum(out, y, h, lora_b[0], routing, compute)
        return out
    out = torch.zeros(y.shape[0], y.shape[1] // 2, dtype=compute, device=y.device)
    naive_swiglu.expand_swiglu(out, y, h, lora_b[0], routing, ALPHA, LIMIT, compute)
    return out
