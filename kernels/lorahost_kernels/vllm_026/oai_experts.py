"""MoE LoRA on vLLM's OAI Triton experts (MXFP4): both base GEMMs keep their rows ordered by expert.

vLLM's own LoRA path for these experts copies the rows into token order and back around the activation. Here the LoRA
kernels address the ordered rows, batches without adapters take the fused path of an engine without LoRA, and
the order comes from one to three launches instead of ten.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe as oai
import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as mxfp4
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.utils import _resize_cache

from lorahost_kernels import configs
from lorahost_kernels.configs import next_pow2
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.expert_order.launch import expert_order
from lorahost_kernels.vllm_026 import graph_nodes
from lorahost_kernels.vllm_026.patching import original, patch

Experts = oai.UnfusedOAITritonExperts


def apply_patches() -> None:
    """Replaces the forward pass of the experts that LoRA can run on, and prefers them to Marlin."""
    patch(Experts, "apply", apply)
    patch(mxfp4, "_get_priority_backends_for_gpt_oss", backends)


def backends() -> list[Any]:
    """vLLM's order of MXFP4 backends; with LoRA these experts are behind the fused ones, which can't have it.

    Measured on an H200, see docs/kernels.md: faster than Marlin at decode and at prefill.
    """
    order: list[Any] = original(mxfp4, "_get_priority_backends_for_gpt_oss")()
    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is None:
        return order
    at = order.index(mxfp4.Mxfp4MoeBackend.TRITON) + 1
    return [*order[:at], mxfp4.Mxfp4MoeBackend.TRITON_UNFUSED, *order[at:]]


def route(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> tuple[Any, Any, Any]:
    """(RoutingData, GatherIndx, ScatterIndx) of the base GEMMs, as vLLM's make_routing_data gives them."""
    pairs = topk_ids.numel()
    if not oai.use_legacy_triton_kernels:
        data: tuple[Any, Any, Any] = oai.make_routing_data(topk_ids, topk_weights, num_experts)
        return data
    from triton_kernels.routing import ExptData  # type: ignore[import-not-found]

    # the tile height that matmul_ogs will choose; another one would be a KeyError there
    block_m = max(16, min(next_pow2(max(1, pairs // num_experts)), 128))
    order = expert_order(topk_ids.contiguous(), topk_weights.contiguous(), num_experts, block_m, torch.bfloat16)
    tiles = ExptData(order.expert_rows, order.first_row, {block_m: order.first_tile}, {block_m: order.tile_map})
    routing = oai.RoutingData(order.row_weights, order.expert_rows, num_experts, topk_ids.shape[1], tiles)
    gather = oai.GatherIndx(src_indx=order.row_pairs, dst_indx=order.pair_rows)
    return routing, gather, oai.ScatterIndx(src_indx=order.pair_rows, dst_indx=order.row_pairs)


def swiglu_limits(quant: Any) -> dict[str, float]:
    """The activation's parameters, as `UnfusedOAITritonExperts.activation` takes them."""
    alpha, limit = quant.gemm1_alpha, quant.gemm1_clamp_limit
    return {"swiglu_alpha": 1.702 if alpha is None else alpha, "swiglu_limit": 7.0 if limit is None else limit}


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """See `UnfusedOAITritonExperts.apply`; what this path doesn't cover goes to the original."""
    context = self._lora_context
    quant = self.quant_config
    if (
        context is None
        or quant is None
        or expert_map is not None
        or context.fully_sharded
        or apply_router_weight_on_input
        or context.punica_wrapper.moe_path != "triton"
    ):
        original(Experts, "apply")(
            self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
            a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        )  # fmt: skip
        return
    experts, _, n = w1.shape
    tokens, hidden = hidden_states.shape
    topk = topk_ids.shape[1]
    routing, gather, scatter = route(topk_ids, topk_weights, experts)
    if context.punica_wrapper.batch_without_adapters() and activation == MoEActivation.SWIGLUOAI:
        oai.triton_kernel_fused_experts(
            output, hidden_states, w1, w2, routing, gather, scatter, topk=topk, activation=activation,
            quant_config=quant, global_num_experts=experts, intermediate_cache=workspace2, **swiglu_limits(quant),
        )  # fmt: skip
        return
    gate_up = _resize_cache(workspace2, (1, tokens * topk, n))
    pair_out = _resize_cache(workspace2, (1, tokens * topk, hidden))
    activated = _resize_cache(workspace13, (tokens * topk, self.adjust_N_for_activation(n, activation)))
    oai.matmul_ogs(
        hidden_states, w1, quant.w1_bias, routing, gather_indx=gather, precision_config=quant.w1_precision, y=gate_up
    )
    lora = context.punica_wrapper.pair_routing(context, topk_ids, topk_weights, gather.dst_indx, tokens)
    add_gate_up(self, context, activated, gate_up.view(-1, n), hidden_states, lora, activation)
    # with one expert a row the second GEMM writes each pair to a row of its own, in token order
    routing.n_expts_act = 1
    oai.matmul_ogs(
        activated, w2, quant.w2_bias, routing, scatter_indx=scatter, precision_config=quant.w2_precision,
        gammas=routing.gate_scal, y=pair_out,
    )  # fmt: skip
    add_down(context, output, pair_out.view(tokens, topk, hidden), activated, lora, topk_ids)


def add_gate_up(
    experts: Any,
    context: Any,
    out: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor,
    lora: Routing | None,
    activation: Any,
) -> None:
    """out (pairs, width) = the activation of y (pairs, columns) + the adapters' gate_up of x (tokens, hidden)."""
    a, b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
    fused = lora is not None and (lora.work is None or configs.FUSED_LIST)
    plain = partial(experts.activation, activation, out, y)
    key = a[0].data_ptr()
    if lora is not None and fused and len(a) == 1 and activation == MoEActivation.SWIGLUOAI:
        limits = swiglu_limits(experts.quant_config)
        alpha, limit = limits["swiglu_alpha"], limits["swiglu_limit"]
        graph_nodes.run_either(key, partial(layer.gate_up_swiglu, out, y, x, a[0], b[0], lora, alpha, limit), plain)
        return
    if lora is not None:
        graph_nodes.run_for(key, partial(layer.gate_up, y, x, a, b, lora))
    plain()


def add_down(
    context: Any,
    out: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor,
    lora: Routing | None,
    topk_ids: torch.Tensor,
) -> None:
    """out (tokens, hidden) = the sum over experts of y (tokens, topk, hidden) + the adapters' down of x."""
    a, b = context.w2_lora_a_stacked, context.w2_lora_b_stacked
    plain = partial(oai.masked_moe_sum, y, topk_ids, out)
    key = a[0].data_ptr()
    if lora is not None and lora.work is None:
        graph_nodes.run_either(key, partial(layer.down_topk_sum, out, y, x, a[0], b[0], lora), plain)
        return
    if lora is not None:
        graph_nodes.run_for(key, partial(layer.down, y, x, a, b, lora))
    plain()
