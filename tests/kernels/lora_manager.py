"""What the plugin reads of vLLM's LoRAModelManager and of its layers, without weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA


class Manager:
    """Modules by name, and the names of the modules that each adapter has weights for; slots: adapter ids."""

    def __init__(
        self, modules: dict[str, Any], weights: dict[int, set[str]], slots: Sequence[int | None] = (None, None, None)
    ) -> None:
        self.modules, self.weights = modules, weights
        self.lora_slots, self.lora_index_to_id = len(slots), list(slots)

    def list_adapters(self) -> dict[int, int]:
        return {i: i for i in self.weights}

    def _get_lora_layer_weights(self, adapter: int, name: str) -> object | None:
        return object() if name in self.weights[adapter] else None


def dense_module(*lora_a: Tensor) -> Any:
    """A linear layer with one buffer for each slice."""
    module = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(module)
    module.lora_a_stacked = lora_a
    return module
