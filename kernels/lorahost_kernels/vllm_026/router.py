"""LoRA on a router that the expert runner calls itself.

vLLM wraps `mlp.gate` and then hangs the wrapper on the wrapped experts, while the runner inside them goes on calling
the plain router: an adapter's router weights have no effect. Here the runner gets the wrapper, too.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from lorahost_kernels.vllm_026.patching import original, patch


def apply_patches() -> None:
    """Repairs each model right after its modules were wrapped."""
    patch(LoRAModelManager, "_create_lora_modules", _create_lora_modules)


def _create_lora_modules(self: Any) -> None:
    original(LoRAModelManager, "_create_lora_modules")(self)
    for module in self.modules.values():
        gate = getattr(module, "gate", None)
        if isinstance(module, FusedMoEWithLoRA) and isinstance(gate, BaseLayerWithLoRA):
            module.base_layer.gate = gate
