"""vLLM's LoRA wrapper for the GPU on this package's kernels: experts and dense layers.

Embeddings, the LM head and fully sharded LoRA stay with vLLM's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.vllm_026.patching import patch

WRAPPER = f"{__name__}.GpuPunicaWrapper"
# Kept alive: the operations live as long as their library.
_library = torch.library.Library("lorahost", "FRAGMENT")  # type: ignore[no-untyped-call]


def apply_patches() -> None:
    """Makes vLLM build `GpuPunicaWrapper`."""
    patch(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: WRAPPER))


def with_work_list(routing: Routing, slots: int, rank: int) -> Routing:
    """The routing with the work list that its size wants; small batches need none."""
    block_m = work_block_m(routing.num_pairs, slots * routing.num_experts, rank)
    return routing if block_m is None else build_work_list(routing, slots, block_m)


def _linear(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    enabled: torch.Tensor,
    no_lora: torch.Tensor,
    add_inputs: bool,
) -> None:
    if no_lora.item():
        return
    slots, _, rank, _ = lora_a[0].shape
    routing = with_work_list(Routing(token_slots[: x.shape[0]], enabled), slots, rank)
    layer.linear(y, x, lora_a, lora_b, routing, add_inputs=add_inputs)


def _linear_fake(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    enabled: torch.Tensor,
    no_lora: torch.Tensor,
    add_inputs: bool,
) -> None:
    return None


direct_register_custom_op(
    op_name="linear",
    op_func=_linear,
    mutates_args=["y"],
    fake_impl=_linear_fake,
    target_lib=_library,
)


class GpuPunicaWrapper(PunicaWrapperGPU):
    """Replaces the hot products; `update_metadata` also marks padded rows as base."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._all_enabled = torch.ones(self.max_loras + 1, dtype=torch.int32, device=device)
        self.token_mapping_meta.token_lora_mapping.fill_(-1)

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        # stock leaves the last batch's slots in rows that this batch only pads
        known = 0 if self._no_lora().item() else len(mapping.index_mapping)
        self.token_mapping_meta.token_lora_mapping[known:].fill_(-1)

    def _no_lora(self) -> torch.Tensor:
        flag: torch.Tensor = self.token_mapping_meta.no_lora_flag_cpu
        return flag

    def _slots(self, tokens: int) -> torch.Tensor:
        slots: torch.Tensor = self.token_mapping_meta.token_lora_mapping
        return slots[:tokens]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """See `PunicaWrapperGPU.add_lora_linear`; the scale is in lora_b already."""
        torch.ops.lorahost.linear(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            list(lora_a_stacked),
            list(lora_b_stacked),
            self.token_mapping_meta.token_lora_mapping,
            self._all_enabled,
            self._no_lora(),
            kwargs.get("add_inputs", True),
        )

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        num_tokens: int,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: torch.Tensor,
        local_num_experts: int,
        top_k: int,
        num_slices: int,
        fully_sharded: bool,
        use_tuned_config: bool,
        add_inputs: bool = True,
        token_lora_mapping: torch.Tensor | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """See `PunicaWrapperGPU.add_lora_w13`; the routing travels to `add_lora_w2` in the first place."""
        if fully_sharded:
            stock: tuple[Any, Any, Any, Any] = super().add_lora_w13(
                y, x, lora_a_stacked, lora_b_stacked, topk_ids, topk_weights, expert_map, w1, w2, num_tokens,
                top_k_num, max_loras, adapter_enabled, local_num_experts, top_k, num_slices, fully_sharded,
                use_tuned_config, add_inputs, token_lora_mapping,
            )  # fmt: skip
            return stock
        if self._no_lora().item():
            return None, None, None, token_lora_mapping
        ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        slots = self._slots(num_tokens) if token_lora_mapping is None else token_lora_mapping
        routing = with_work_list(
            Routing(slots, adapter_enabled, local_num_experts, ids.to(torch.int32).contiguous()),
            max_loras,
            lora_a_stacked[0].shape[-2],
        )
        out = y.view(-1, top_k_num, y.shape[-1])
        layer.gate_up(out, x, lora_a_stacked, lora_b_stacked, routing, add_inputs=add_inputs)
        return routing, None, None, token_lora_mapping

    def add_lora_w2(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor,
        sorted_token_ids_lora: Any,
        expert_ids_lora: Any,
        num_tokens_post_padded_lora: Any,
        token_lora_mapping: torch.Tensor | None,
        num_tokens: int,
        w1: torch.Tensor,
        w2: torch.Tensor,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: torch.Tensor,
        top_k: int,
        fully_sharded: bool,
        tp_rank: int,
        use_tuned_config: bool,
        add_inputs: bool = True,
    ) -> None:
        """See `PunicaWrapperGPU.add_lora_w2`."""
        if fully_sharded:
            super().add_lora_w2(
                y, x, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids_lora, expert_ids_lora,
                num_tokens_post_padded_lora, token_lora_mapping, num_tokens, w1, w2, top_k_num, max_loras,
                adapter_enabled, top_k, fully_sharded, tp_rank, use_tuned_config, add_inputs,
            )  # fmt: skip
            return
        routing = sorted_token_ids_lora
        if routing is None:
            return
        weighted = replace(routing, topk_weights=topk_weights.to(torch.float32).contiguous())
        out = y.view(-1, top_k_num, y.shape[-1])
        layer.down(out, x, lora_a_stacked, lora_b_stacked, weighted, add_inputs=add_inputs)
