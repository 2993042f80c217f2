"""Compiles what prefill needs before the engine says that it is ready.

vLLM runs the model at every size that it captures a CUDA graph for, and once at the largest batch. Batches in between
reach kernels that none of these did, and the first request would wait for their compilation.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import vllm.v1.worker.gpu_worker as gpu_worker

from lorahost_kernels.configs import next_pow2
from lorahost_kernels.ops.expert_order.launch import count_tiles
from lorahost_kernels.tuned import start as tuned
from lorahost_kernels.vllm_026.patching import original, patch

log = logging.getLogger("vllm.lorahost")


def apply_patches() -> None:
    """Loads tuned configurations, and adds our sizes to vLLM's own warm-up; both come before CUDA graphs."""
    patch(gpu_worker, "kernel_warmup", kernel_warmup)


def kernel_warmup(worker: Any) -> None:
    """See vLLM's kernel_warmup."""
    original(gpu_worker, "kernel_warmup")(worker)
    runner = worker.model_runner
    if runner.lora_config is None:
        return
    config = worker.model_config.hf_text_config
    tuned.start(
        config.to_dict(),
        slots=runner.lora_config.max_loras,
        tensor_parallel=worker.parallel_config.tensor_parallel_size,
    )
    low, high = largest_graph(worker), worker.scheduler_config.max_num_batched_tokens
    experts, topk = experts_of(config)
    sizes = sorted({*between(low, high), *gemm_variants(low, high, experts, topk)}, reverse=True)
    start = time.monotonic()
    for size in sizes:
        for adapters in (runner.lora_config.max_loras + 1, 0):
            runner._dummy_run(size, skip_eplb=True, remove_lora=False, num_active_loras=adapters)
    runner.maybe_remove_all_loras(runner.lora_config)
    log.info("lorahost warm-up: %d prefill sizes %s in %.1f s", len(sizes), sizes, time.monotonic() - start)


def largest_graph(worker: Any) -> int:
    """Tokens of the largest captured graph; 0 without graphs."""
    sizes = worker.vllm_config.compilation_config.cudagraph_capture_sizes
    return 0 if worker.model_config.enforce_eager or not sizes else int(max(sizes))


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
    """One size for each compiled variant of the base MoE GEMMs: Triton makes one where 16 divides a count."""
    found: dict[tuple[object, ...], int] = {}
    for size in range(high, low, -1):
        pairs = size * topk
        block = max(16, min(next_pow2(max(1, pairs // experts)), 128))
        tiles = count_tiles(pairs, experts, block)
        found.setdefault((block, size % 16 == 0, pairs % 16 == 0, tiles % 16 == 0), size)
    return list(found.values())
