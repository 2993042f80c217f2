"""LoRA on Mixture-of-Experts layers on the CPU, which vLLM 0.26.0 refuses.

vLLM's LoRA layer allocates the slots and copies adapters into them; this module replaces only how it hooks into
the MoE layer and how a batch with adapters is computed. A batch without adapters takes vLLM's own path.
"""

# mypy: disallow-subclassing-any=False, disallow-untyped-calls=False
from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.layers.utils import _get_lora_device
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN, CPUFusedMOE, select_experts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from lorahost_kernels.vllm_026 import grouped
from lorahost_kernels.vllm_026.patching import original, patch


class CpuLoRAMoEMethod(FusedMoEMethodBase, torch.nn.Module):
    """Runs an unquantised MoE layer with per-token adapters.

    Args:
        base_method: The layer's own method; it keeps serving batches without adapters.
        lora_layer: The LoRA layer that holds the slots.
    """

    def __init__(self, base_method: Any, lora_layer: Any) -> None:
        super().__init__(base_method.moe)
        self.base_method = base_method
        # In a list, or the module tree would have a cycle: the LoRA layer owns the layer that owns this method.
        self._lora_layer = [lora_layer]

    @property
    def is_monolithic(self) -> bool:
        return True

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the base method has created the weights")

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self.base_method.get_fused_moe_quant_config(layer)

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output of the routed experts, `(tokens, hidden)` in x's dtype.

        Args:
            layer: vLLM's RoutedExperts, weights unpacked.
            x: `(tokens, hidden)`.
            router_logits: `(tokens, experts)`.
            input_ids: Unused.
        """
        lora = self._lora_layer[0]
        slots = lora.punica_wrapper.token_slots(x.shape[0])
        if slots is None:
            base_output: torch.Tensor = self.base_method.apply_monolithic(layer, x, router_logits, input_ids)
            return base_output
        weights, experts = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return _experts_with_lora(layer, lora, x, weights, experts.long(), slots)


def _experts_with_lora(
    layer: Any,
    lora: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Experts and their LoRA for `(tokens, hidden)` x; weights and experts are `(tokens, top-k)`, slots `(tokens,)`."""
    top_k = experts.shape[1]
    # One row per (token, expert) pair, sorted by expert, so that an expert's rows are one slice.
    order = experts.flatten().argsort(stable=True)
    tokens = order // top_k
    row_expert = experts.flatten()[order]
    row_slot = slots[tokens]
    sizes = torch.bincount(row_expert, minlength=layer.local_num_experts).tolist()
    # A slot whose adapter has no expert weights is disabled; -1 reads the extra last entry, which stays 0.
    rows = (lora.adapter_enabled[row_slot] > 0).logical_and(row_slot >= 0).nonzero().squeeze(-1)
    lora_slot, lora_expert = row_slot[rows], row_expert[rows]

    row_x = x[tokens]
    gate_up = _by_expert(layer.gate_up_linear, row_x, sizes)
    lora_x = row_x[rows]
    offset = 0
    for a, b in zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True):
        h = grouped.shrink(lora_x, a, lora_slot, lora_expert)
        grouped.expand(gate_up, rows, h, b, lora_slot, lora_expert, offset)
        offset += b.shape[2]

    activated = _CPU_MOE_ACT_FN[layer.activation](gate_up)
    down = _by_expert(layer.down_linear, activated, sizes)
    h = grouped.shrink(activated[rows], lora.w2_lora_a_stacked[0], lora_slot, lora_expert)
    grouped.expand(down, rows, h, lora.w2_lora_b_stacked[0], lora_slot, lora_expert)

    unsorted = torch.empty_like(down)
    unsorted[order] = down
    pairs = unsorted.view(*experts.shape, -1).to(weights.dtype)
    return (pairs * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _by_expert(linears: list[Any], rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Each expert's linear on its slice of rows that are sorted by expert."""
    slices = rows.split(sizes)
    return torch.cat([linears[expert](part) for expert, part in enumerate(slices) if len(part)])


def _init_lora_layer(self: Any, base_layer: Any) -> None:
    """`FusedMoEWithLoRA.__init__` for the CPU: same attributes, our method in place of the kernel object.

    Raises:
        ValueError: a parallelism, kernel or model that MoE LoRA on the CPU doesn't cover.
    """
    BaseLayerWithLoRA.__init__(self)
    experts = base_layer.routed_experts
    _check_covered(base_layer, experts)
    experts.lora_base_layer_prefix = "base_layer."
    self.base_layer = base_layer
    self.moe_config = base_layer.moe_config
    self._shared_experts = base_layer._shared_experts
    self.tp_size = self.moe_config.moe_parallel_config.tp_size
    self.tp_rank = self.moe_config.moe_parallel_config.tp_rank
    self.device = _get_lora_device(base_layer)
    self._w13_slices = 2
    self.enable_moe_shared_loras = False
    self.n_slices = self.local_num_experts * (self._w13_slices + 1)
    base_layer._replace_quant_method(CpuLoRAMoEMethod(experts.quant_method, self))


def _check_covered(base_layer: Any, experts: Any) -> None:
    name = base_layer.layer_name
    if base_layer.moe_config.moe_parallel_config.use_ep:
        raise ValueError(f"{name}: MoE LoRA on the CPU does not cover expert parallelism; use tensor parallelism")
    if not base_layer.moe_config.is_act_and_mul:
        raise ValueError(f"{name}: MoE LoRA on the CPU covers gated experts only (gate, up and down projections)")
    if experts.apply_router_weight_on_input:
        raise ValueError(f"{name}: MoE LoRA on the CPU does not cover router weights on the experts' input")
    if experts.activation not in _CPU_MOE_ACT_FN:
        known = ", ".join(sorted(activation.value for activation in _CPU_MOE_ACT_FN))
        raise ValueError(f"{name}: activation {experts.activation.value} is not one that the CPU has: {known}")
    if not hasattr(experts, "gate_up_linear"):
        raise ValueError(
            f"{name}: MoE LoRA on the CPU needs unquantised, unpacked experts, but the method is "
            f"{type(experts.quant_method).__name__}; use a bf16, fp16 or fp32 model and leave VLLM_CPU_SGL_KERNEL unset"
        )


def _set_mapping(self: Any, punica_wrapper: Any) -> None:
    """`FusedMoEWithLoRA.set_mapping` for the CPU: there is no kernel object to hand a context to."""
    BaseLayerWithLoRA.set_mapping(self, punica_wrapper)


def _check_grouped_gemm(self: Any, layer: Any) -> tuple[bool, str]:
    """`CPUFusedMOE.check_grouped_gemm`: with LoRA the expert weights stay unpacked."""
    if layer.moe_config.is_lora_enabled:
        return False, "none"
    decision: tuple[bool, str] = original(CPUFusedMOE, "check_grouped_gemm")(self, layer)
    return decision


def apply_patches() -> None:
    """Lets vLLM wrap MoE layers on the CPU."""
    patch(CPUFusedMOE, "check_grouped_gemm", _check_grouped_gemm)
    patch(FusedMoEWithLoRA, "__init__", _init_lora_layer)
    patch(FusedMoEWithLoRA, "set_mapping", _set_mapping)
