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
from vllm.utils.import_utils import has_triton_kernels
from vllm.utils.torch_utils import direct_register_custom_op

from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.vllm_026 import dense_lists, graph_nodes, module_flags, warm
from lorahost_kernels.vllm_026.gpu_metadata import (
    Staging,
    fill_dense_lists,
    fill_indices,
    fill_kernel_meta,
    groups_of,
    slots_of,
    staging_size,
)
from lorahost_kernels.vllm_026.install import choose_paths
from lorahost_kernels.vllm_026.patching import patch

WRAPPER = f"{__name__}.GpuPunicaWrapper"
# Kept alive: the operations live as long as their library.
_library = torch.library.Library("lorahost", "FRAGMENT")  # type: ignore[no-untyped-call]


def apply_patches() -> None:
    """Makes vLLM build `GpuPunicaWrapper`, with the experts that know it."""
    patch(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: WRAPPER))
    warm.apply_patches()
    module_flags.apply_patches()
    if has_triton_kernels():
        from lorahost_kernels.vllm_026 import oai_experts

        oai_experts.apply_patches()


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
    lists: torch.Tensor,
    enabled: torch.Tensor,
    no_lora: torch.Tensor,
    add_inputs: bool,
) -> None:
    if no_lora.item():
        return

    def launch() -> None:
        slots, _, rank, _ = lora_a[0].shape
        tokens = x.shape[0]
        routing = Routing(token_slots[:tokens], module_flags.flags_of(lora_a[0], enabled))
        block_m = work_block_m(tokens, slots, rank)
        if block_m is not None:
            work = dense_lists.work_list(lists, tokens, token_slots.shape[0], slots, block_m)
            routing = build_work_list(routing, slots, block_m) if work is None else replace(routing, work=work)
        layer.linear(y, x, lora_a, lora_b, routing, add_inputs=add_inputs)

    graph_nodes.run_for(lora_a[0].data_ptr(), launch)


def _linear_fake(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    lists: torch.Tensor,
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
    """Replaces the hot products, and the mapping of a step's rows to slots."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        paths = choose_paths(device, self.lora_config.lora_dtype)
        self.moe_path, self.dense_path = paths.moe, paths.dense
        self._all_enabled = torch.ones(self.max_loras + 1, dtype=torch.int32, device=device)
        self._max_tokens = max_num_batched_tokens
        size = dense_lists.buffer_size(max_num_batched_tokens, self.max_loras)
        self._dense_lists = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(staging_size(max_num_batched_tokens, self.max_loras, size), device)
        for meta in (self.token_mapping_meta, self.prompt_mapping_meta):
            meta.token_lora_mapping.fill_(-1)

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """See `PunicaWrapperGPU.update_metadata`; nothing here waits for the device."""
        self.is_prefill = mapping.is_prefill
        tokens = slots_of(mapping.index_mapping, lora_index_to_id)
        prompts = slots_of(mapping.prompt_mapping, lora_index_to_id)
        groups = groups_of(tokens)
        with self._staging as staging:
            fill_kernel_meta(staging, self.token_mapping_meta, tokens, groups)
            fill_dense_lists(staging, self._dense_lists, groups, self._max_tokens, self.max_loras)
            fill_indices(staging, self, tokens, prompts, max_loras, vocab_size)
            fill_kernel_meta(staging, self.prompt_mapping_meta, prompts, groups_of(prompts))

    def _no_lora(self) -> torch.Tensor:
        flag: torch.Tensor = self.token_mapping_meta.no_lora_flag_cpu
        return flag

    def batch_without_adapters(self) -> bool:
        """Whether no row of this step uses an adapter; fixed while a CUDA graph is captured."""
        return bool(self._no_lora().item())

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
        if self.dense_path != "triton":
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **kwargs)
            return
        torch.ops.lorahost.linear(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            list(lora_a_stacked),
            list(lora_b_stacked),
            self.token_mapping_meta.token_lora_mapping,
            self._dense_lists,
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
        if fully_sharded or self.moe_path != "triton":
            stock: tuple[Any, Any, Any, Any] = super().add_lora_w13(
                y, x, lora_a_stacked, lora_b_stacked, topk_ids, topk_weights, expert_map, w1, w2, num_tokens,
                top_k_num, max_loras, adapter_enabled, local_num_experts, top_k, num_slices, fully_sharded,
                use_tuned_config, add_inputs, token_lora_mapping,
            )  # fmt: skip
            return stock
        if self.batch_without_adapters():
            return None, None, None, token_lora_mapping

        def launch() -> Routing:
            ids = topk_ids
            if expert_map is not None:
                # -1 marks rows without an expert, and would index the map's end
                ids = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
            slots = self._slots(num_tokens) if token_lora_mapping is None else token_lora_mapping
            routing = with_work_list(
                Routing(slots, adapter_enabled, local_num_experts, ids.to(torch.int32).contiguous()),
                max_loras,
                lora_a_stacked[0].shape[-2],
            )
            out = y.view(-1, top_k_num, y.shape[-1])
            layer.gate_up(out, x, lora_a_stacked, lora_b_stacked, routing, add_inputs=add_inputs)
            return routing

        routing = graph_nodes.run_for(lora_a_stacked[0].data_ptr(), launch)
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
        if fully_sharded or self.moe_path != "triton":
            super().add_lora_w2(
                y, x, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids_lora, expert_ids_lora,
                num_tokens_post_padded_lora, token_lora_mapping, num_tokens, w1, w2, top_k_num, max_loras,
                adapter_enabled, top_k, fully_sharded, tp_rank, use_tuned_config, add_inputs,
            )  # fmt: skip
            return
        routing = sorted_token_ids_lora
        if routing is None:
            return

        def launch() -> None:
            weighted = replace(routing, topk_weights=topk_weights.to(torch.float32).contiguous())
            out = y.view(-1, top_k_num, y.shape[-1])
            layer.down(out, x, lora_a_stacked, lora_b_stacked, weighted, add_inputs=add_inputs)

        graph_nodes.run_for(lora_a_stacked[0].data_ptr(), launch)

    def pair_routing(
        self,
        context: Any,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        pair_rows: torch.Tensor,
        tokens: int,
    ) -> Routing | None:
        """The LoRA work of one MoE layer with rows ordered by expert; None where there is none. See oai_experts."""
        if self.batch_without_adapters():
            return None

        def launch() -> Routing:
            routing = Routing(
                self._slots(tokens),
                context.adapter_enabled,
                context.local_num_experts,
                topk_ids.to(torch.int32).contiguous(),
                topk_weights.to(torch.float32).contiguous(),
                pair_rows,
            )
            return with_work_list(routing, context.max_loras, context.w13_lora_a_stacked[0].shape[-2])

        return graph_nodes.run_for(context.w13_lora_a_stacked[0].data_ptr(), launch)
