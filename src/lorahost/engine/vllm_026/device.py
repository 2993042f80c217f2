"""Free memory of the device that the engine will run on, before it starts."""

from __future__ import annotations

from pathlib import Path

from lorahost.capacity import base_bytes, host_free_bytes

GPU_MEMORY_SHARE = 0.9


def device_free_bytes(model_dir: Path, shards: int = 1) -> int:
    """What the base model's weights leave free: of one GPU's memory vLLM's default share, or of the host's.

    Args:
        model_dir: Folder of the base model.
        shards: GPUs that its weights are spread over.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        total = int(current_platform.get_device_total_memory() * GPU_MEMORY_SHARE)
    else:
        total = host_free_bytes()
    return max(0, total - base_bytes(model_dir) // shards)
