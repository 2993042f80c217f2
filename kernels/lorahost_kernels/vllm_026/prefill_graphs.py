"""CUDA graphs for prefill, too: vLLM captures none above a few hundred tokens, and prefill then waits for the host.

A prefill step of 1600 tokens takes the GPU a fraction of the time in which Python launches its kernels one by one.
Figures are in docs/kernels.md. What the user says about sizes goes first: `cudagraph_capture_sizes`,
`max_cudagraph_capture_size`, `compile_sizes`, `enforce_eager`, and modes without piecewise graphs leave them to vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.utils import AttentionGroup

from lorahost_kernels.vllm_026.patching import original, patch

log = logging.getLogger("vllm.lorahost")

# above it a step keeps the GPU busy for longer than the host needs to launch it
LARGEST = 8192
# below it a step takes about as long as reading the weights, so padding should cost little (not measured)
COARSE_BELOW = 512
FREE = "lorahost_sizes_are_free"


def apply_patches() -> None:
    """Adds sizes to those that vLLM captures, and keeps them from what its attention plans for decode."""
    patch(VllmConfig, "try_verify_and_update_config", try_verify_and_update_config)
    patch(VllmConfig, "_set_cudagraph_sizes", set_cudagraph_sizes)
    patch(AttentionGroup, "create_metadata_builders", create_metadata_builders)
    patch(CudagraphDispatcher, "get_capture_descs", get_capture_descs)


def ladder(low: int, high: int) -> list[int]:
    """Sizes above `low` up to `high`: four between a power of two and the next, eight from COARSE_BELOW on."""
    sizes: list[int] = []
    size = low
    while size < high:
        octave = 1 << (size.bit_length() - 1)
        step = max(16, octave // (4 if size < COARSE_BELOW else 8))
        size = min((size // step + 1) * step, high)
        sizes.append(size)
    return sizes


def query_length(config: Any) -> int:
    """Tokens that a request has in a step without prefill."""
    length: int = 1 + config.num_speculative_tokens
    return length


def decode_limit(config: Any) -> int:
    """Tokens up to which steps without prefill use graphs: vLLM's limit, or all requests at once if that is more."""
    tokens: int = config.scheduler_config.max_num_seqs * query_length(config)
    return max(tokens, min(2 * tokens, 512))


def is_free(config: Any) -> bool:
    """Whether the sizes are ours to choose: there is LoRA, and the user has given nothing about them.

    Not with data parallelism: once all ranks run graphs, vLLM pads all of them to the largest one's size.
    """
    graphs = config.compilation_config
    return (
        config.lora_config is not None
        and config.parallel_config.data_parallel_size == 1
        and graphs.cudagraph_capture_sizes is None
        and graphs.max_cudagraph_capture_size is None
        and not graphs.compile_sizes
    )


def try_verify_and_update_config(self: Any) -> None:
    """See `VllmConfig.try_verify_and_update_config`, in which a model may set a limit that no user asked for."""
    vars(self)[FREE] = is_free(self)
    original(VllmConfig, "try_verify_and_update_config")(self)


def set_cudagraph_sizes(self: Any) -> None:
    """See `VllmConfig._set_cudagraph_sizes`; with the ladder in place of vLLM's own sizes above what decode needs."""
    original(VllmConfig, "_set_cudagraph_sizes")(self)
    graphs = self.compilation_config
    if not vars(self).pop(FREE, False) or not graphs.cudagraph_capture_sizes:
        return
    # the mode and sequence parallelism are only settled by now
    if graphs.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE or graphs.pass_config.enable_sp:
        return
    limit, length = decode_limit(self), query_length(self)
    # vLLM rounds sizes up to whole requests, and drops those that would then be too large
    high = min(self.scheduler_config.max_num_batched_tokens, LARGEST) // length * length
    decode = [size for size in graphs.cudagraph_capture_sizes if size <= limit]
    if high <= decode[-1]:
        return
    sizes = [*decode, *ladder(decode[-1], high)]
    graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, high
    log.info("lorahost: CUDA graphs for prefill, too: %d sizes up to %d tokens", len(sizes), high)


def create_metadata_builders(
    self: Any, vllm_config: Any, device: Any, kernel_block_size: int | None = None, num_metadata_builders: int = 1
) -> None:
    """See `AttentionGroup.create_metadata_builders`: attention, which runs outside these graphs, sees decode's sizes.

    FlashAttention would split the keys of every step up to the largest size into 32 parts, and allocate an fp32 output
    for each: 4.3 GB for 8192 tokens of GPT-OSS. It would for sizes that a user gives, too.
    """
    graphs = vllm_config.compilation_config
    sizes, largest = graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size
    limit = decode_limit(vllm_config)
    if sizes and largest > limit and graphs.cudagraph_mode.mixed_mode() != CUDAGraphMode.FULL:
        graphs.cudagraph_capture_sizes = [size for size in sizes if size <= limit] or sizes[:1]
        # a bound: decode's graphs may be rounded up to it
        graphs.max_cudagraph_capture_size = limit
    try:
        build = original(AttentionGroup, "create_metadata_builders")
        build(self, vllm_config, device, kernel_block_size, num_metadata_builders)
    finally:
        graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, largest


def get_capture_descs(self: Any) -> list[tuple[Any, list[Any]]]:
    """See `CudagraphDispatcher.get_capture_descs`: all sizes with adapters, then all without.

    vLLM estimates the graphs' memory by what the second one takes beyond the first, times their number. The first one
    without adapters takes memory of its own, which is no other's.
    """
    found = original(CudagraphDispatcher, "get_capture_descs")(self)
    return [(mode, sorted(descs, key=lambda d: (-d.num_active_loras, -d.num_tokens))) for mode, descs in found]
