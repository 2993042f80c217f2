"""Each rank's share of an expert's intermediate columns under tensor parallelism, where a backend pads them.

vLLM 0.26.0 cuts LoRA weights by the padded size, so every rank but the first gets columns of its neighbour: GPT-OSS on
two GPUs has 1440 columns a rank, padded to 1536 by Marlin. The base weights are cut by the size without padding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA

from lorahost_kernels.vllm_026.patching import original, patch

CUTS = ((FusedMoEWithLoRA, "_slice_w13_b"), (FusedMoE3DWithLoRA, "_slice_w13_b"), (FusedMoEWithLoRA, "_slice_w2_a"))


def apply_patches() -> None:
    """Cuts w13's B and w2's A as the base weights are cut."""
    for cls, name in CUTS:
        patch(cls, name, by_true_size(cls, name))


def by_true_size(cls: type, name: str) -> Any:
    """`cls.name` as it works on a layer whose columns are not padded."""

    def cut(self: Any, weights: torch.Tensor) -> torch.Tensor:
        padded = self.moe_config
        self.moe_config = copy.copy(padded)
        self.moe_config.intermediate_size_per_partition = padded.intermediate_size_per_partition_unpadded
        try:
            share: torch.Tensor = original(cls, name)(self, weights)
        finally:
            self.moe_config = padded
        return share

    return cut
