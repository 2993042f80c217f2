"""Compiles what prefill needs before the engine says that it is ready.

vLLM runs the model at every size that it captures a CUDA graph for, and once at the largest batch. Batches in between
reach kernels that none of these did, and the first request would wait for their compilation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from lorahost_kernels.configs import expand_config, next_pow2, shrink_config, work_block_m
from lorahost_kernels.ops.common.defaults import programs_of
from lorahost_kernels.ops.expert_order.launch import count_tiles
from lorahost_kernels.tuned import start as tuned
from lorahost_kernels.vllm_026 import install
from lorahost_kernels.vllm_026.expert_tiles import has_idle_programs
from lorahost_kernels.vllm_026.patching import original, patch

log = logging.getLogger("vllm.lorahost")


def apply_patches() -> None:
    """Loads tuned configurations, and adds our sizes to vLLM's own warm-up, all before CUDA graphs are captured."""
    patch(gpu_worker, "kernel_warmup", kernel_warmup)


def kernel_warmup(worker: Any) -> None:
    """See vLLM's kernel_warmup."""
    original(gpu_worker, "kernel_warmup")(worker)
    runner = worker.model_runner
    if runner.lora_config is None:
        return
    install.skip_untouched(untried(worker))
    config = worker.model_config.hf_text_config
    modules = runner.lora_manager._adapter_manager.modules.values()
    tuned.start(
        config.to_dict(),
        slots=runner.lora_config.max_loras,
        tensor_parallel=worker.parallel_config.tensor_parallel_size,
        fused=any(map(runs_fused_expands, modules)),
    )
    high = worker.scheduler_config.max_num_batched_tokens
    experts, topk = experts_of(config)
    products = products_of(modules, topk)
    start = time.monotonic()
    lows = {n: largest_graph(worker, n > 0) for n in (runner.lora_config.max_loras + 1, 0)}
    sizes = {low: prefill_sizes(low, high, experts, topk, products) for low in set(lows.values())}
    for adapters, low in lows.items():
        for size in sizes[low]:
            runner._dummy_run(size, skip_eplb=True, remove_lora=False, num_active_loras=adapters)
        took = time.monotonic() - start
        log.info("lorahost warm-up: prefill sizes %s, %d adapters, %.1f s", sizes[low], adapters, took)
    runner.maybe_remove_all_loras(runner.lora_config)


def untried(worker: Any) -> str:
    """What an engine has with which nobody has tried graphs that lack launches, if anything."""
    if worker.parallel_config.world_size > 1:
        return "several GPUs"
    return "speculative decoding" if worker.vllm_config.speculative_config else ""


def prefill_sizes(low: int, high: int, experts: int, topk: int, products: Collection[Product]) -> list[int]:
    """Sizes above `low` up to `high` that together compile what any of them needs, the largest first."""
    known = {*between(low, high), *gemm_variants(low, high, experts, topk)}
    return sorted({*known, *lora_variants(low, high, products, known)}, reverse=True)


def runs_fused_expands(module: Any) -> bool:
    """Whether a module with LoRA is experts that `oai_experts.add_gate_up` gives the fused expands."""
    kernel = getattr(module, "_moe_kernel", None)
    if kernel is None or len(module.w13_lora_a_stacked) != 1:
        return False
    # by name: where triton_kernels is missing, the module of the class can't be imported
    kinds = {kind.__name__ for kind in type(kernel.fused_experts).__mro__}
    return "UnfusedOAITritonExperts" in kinds and module.moe_config.activation == MoEActivation.SWIGLUOAI


def largest_graph(worker: Any, adapters: bool) -> int:
    """Tokens of the largest captured graph of batches with or without adapters; 0 where there is none."""
    graphs = worker.vllm_config.compilation_config
    sizes = graphs.cudagraph_capture_sizes
    if worker.model_config.enforce_eager or not sizes or not (adapters or graphs.cudagraph_specialize_lora):
        return 0
    return int(max(sizes))


def experts_of(config: Any) -> tuple[int, int]:
    """(experts, experts a token) of a Hugging Face configuration; (1, 1) for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for name in names if isinstance(n := getattr(config, name, None), int)), 1)
    topk = next((n for name in ("num_experts_per_tok", "experts_per_token") if (n := getattr(config, name, None))), 1)
    return experts, int(topk)


def between(low: int, high: int) -> list[int]:
    """Sizes above `low` up to `high`, both ends included, each about a tenth above the next."""
    sizes: list[int] = []
    size = high
    while size > low:
        sizes.append(size)
        size = min(size - 1, size * 10 // 11)
    return [*sizes, low + 1] if sizes and sizes[-1] != low + 1 else sizes


def gemm_variants(low: int, high: int, experts: int, topk: int) -> list[int]:
    """One size for each compiled variant of the base MoE GEMMs: Triton makes one where 16 divides a count.

    And `expert_tiles` makes one.
    """
    found: dict[tuple[object, ...], int] = {}
    for size in range(high, low, -1):
        pairs = size * topk
        block = max(16, min(next_pow2(max(1, pairs // experts)), 128))
        tiles = count_tiles(pairs, experts, block)
        idle = has_idle_programs(pairs, experts, block)
        found.setdefault((block, idle, size % 16 == 0, pairs % 16 == 0, tiles % 16 == 0), size)
    return list(found.values())


class Product(NamedTuple):
    """What the default tiles of a module's LoRA product depend on, but for the batch's size."""

    topk: int
    groups: int
    rank: int
    k: int
    n: int
    slices: int
    programs: int


def products_of(modules: Collection[Any], topk: int) -> set[Product]:
    """The different products of an engine's modules; topk: experts a token."""
    found: set[Product] = set()
    for module in modules:
        if isinstance(module, BaseLinearLayerWithLoRA):
            found.add(product(module.lora_a_stacked, module.lora_b_stacked, 1))
        elif hasattr(module, "w13_lora_a_stacked"):
            found.add(product(module.w13_lora_a_stacked, module.w13_lora_b_stacked, topk))
            found.add(product(module.w2_lora_a_stacked, module.w2_lora_b_stacked, topk))
    return found


def product(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], topk: int) -> Product:
    """Of stacked weights (slots, experts or 1, rank, k) and (slots, experts or 1, n, rank), one for each slice."""
    slots, _, rank, k = a[0].shape
    experts = max(a[0].shape[1], b[0].shape[1])
    return Product(topk, slots * experts, rank, k, b[0].shape[2], len(b), programs_of(a[0].device))


def lora_variants(low: int, high: int, products: Collection[Product], known: Collection[int]) -> list[int]:
    """One size for each set of default tiles that no size in `known` has: some serve a few sizes in a row only."""
    found: dict[tuple[object, ...], int] = {}
    for size in (*known, *range(high, low, -1)):
        for p in products:
            pairs = size * p.topk
            block_m = work_block_m(pairs, p.groups, p.rank)
            shrink = shrink_config(pairs, p.groups, p.rank, p.k, p.slices, block_m, p.programs)
            expand = expand_config(pairs, p.groups, p.rank, p.n, p.slices, block_m, p.programs)
            found.setdefault((p, shrink, expand), size)
    return list(set(found.values()) - set(known))
