"""Who computes a layer's LoRA work: our operations, or stock vLLM's PunicaWrapperGPU where vLLM is installed."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from bench.cases import Layer, MoeShape
from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.work_list.launch import build_work_list

Call = Callable[[], Any]


class Provider(Protocol):
    """Builds calls that do one layer's LoRA work in place, as an engine would do it in each step."""

    name: str

    def moe(self, shape: MoeShape, gate_up: Layer, down: Layer) -> Call:
        """gate_up, then down, grouping of the rows included."""

    def dense(self, modules: Sequence[Layer]) -> Call:
        """Every linear layer of a block; grouping by adapter happens once a step and is not included."""


class Ours:
    """lorahost_kernels with its default tiles."""

    name = "lorahost"

    def moe(self, shape: MoeShape, gate_up: Layer, down: Layer) -> Call:
        """See Provider."""
        slots, _, rank, _ = gate_up.lora_a[0].shape
        block_m = work_block_m(gate_up.routing.num_pairs, slots * shape.experts, rank)

        def call() -> None:
            routing = gate_up.routing if block_m is None else build_work_list(gate_up.routing, slots, block_m)
            ops.gate_up(gate_up.y, gate_up.x, gate_up.lora_a, gate_up.lora_b, routing)
            ops.down(down.y, down.x, down.lora_a, down.lora_b, routing)

        return call

    def dense(self, modules: Sequence[Layer]) -> Call:
        """See Provider."""
        routing = self.grouped(modules[0])

        def call() -> None:
            for m in modules:
                ops.linear(m.y, m.x, m.lora_a, m.lora_b, routing)

        return call

    def grouped(self, module: Layer) -> Routing:
        """The routing, with a work list where the batch is large enough."""
        slots, _, rank, _ = module.lora_a[0].shape
        block_m = work_block_m(module.routing.num_pairs, slots, rank)
        return module.routing if block_m is None else build_work_list(module.routing, slots, block_m)


class Stock:
    """vLLM's own wrapper, called as its MoE experts and linear layers call it; raises ImportError without vLLM."""

    def __init__(self) -> None:
        import vllm
        from vllm.lora.ops.triton_ops import fused_moe_lora_op, utils
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

        self.name = f"vllm {vllm.__version__}"
        self._wrapper = PunicaWrapperGPU
        self._caches = (fused_moe_lora_op._LORA_PTR_DICT, utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT)

    def wrapper(self, module: Layer) -> Any:
        """A wrapper whose metadata describe this batch."""
        slots, tokens = module.lora_a[0].shape[0], module.routing.num_tokens
        config = SimpleNamespace(max_loras=slots, specialize_active_lora=False)
        made = self._wrapper(max(tokens, 16), max(tokens, 16), "cuda", lora_config=config)
        for cache in self._caches:
            cache.clear()  # keyed by address: another shape at a freed tensor's address would inherit its strides
        made.token_mapping_meta.prepare_tensors(module.routing.token_slots.to(torch.int64))
        return made

    def moe(self, shape: MoeShape, gate_up: Layer, down: Layer) -> Call:
        """See Provider."""
        punica, routing = self.wrapper(gate_up), gate_up.routing
        slots, width = gate_up.lora_a[0].shape[0], 2 * shape.intermediate
        w1 = torch.empty(shape.experts, width, shape.hidden, device="meta")
        w2 = torch.empty(shape.experts, shape.hidden, shape.intermediate, device="meta")
        common: dict[str, Any] = {
            "topk_weights": routing.topk_weights,
            "w1": w1,
            "w2": w2,
            "num_tokens": routing.num_tokens,
            "top_k_num": shape.topk,
            "max_loras": slots,
            "adapter_enabled": routing.adapter_enabled,
            "top_k": shape.topk,
            "fully_sharded": False,
            "use_tuned_config": False,
        }

        def call() -> None:
            grouping = punica.add_lora_w13(
                gate_up.y,
                gate_up.x,
                tuple(gate_up.lora_a),
                tuple(gate_up.lora_b),
                topk_ids=routing.topk_ids,
                expert_map=None,
                local_num_experts=shape.experts,
                num_slices=shape.slices,
                **common,
            )
            keys = (
                "sorted_token_ids_lora",
                "expert_ids_lora",
                "num_tokens_post_padded_lora",
                "token_lora_mapping",
            )
            punica.add_lora_w2(
                down.y,
                down.x,
                tuple(down.lora_a),
                tuple(down.lora_b),
                tp_rank=0,
                **dict(zip(keys, grouping, strict=True)),
                **common,
            )

        return call

    def dense(self, modules: Sequence[Layer]) -> Call:
        """See Provider."""
        punica = self.wrapper(modules[0])

        def call() -> None:
            for m in modules:
                widths = tuple(b.shape[2] for b in m.lora_b)
                punica.add_lora_linear(m.y, m.x, tuple(m.lora_a), tuple(m.lora_b), 1.0, widths)

        return call
