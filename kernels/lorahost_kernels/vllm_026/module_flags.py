"""Which adapter slots hold weights for a dense module, so that modules without any cost no memory traffic.

vLLM keeps such a flag for experts only, and multiplies by the zeros of an untouched module. The flags lie on the
device: CUDA graphs that were captured before an adapter came read what it brought.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from lorahost_kernels.vllm_026.patching import original, patch

# by the address of a module's first lora_a buffer, which stays where it is as long as the engine runs
_flags: dict[int, torch.Tensor] = {}
TABLE = "_lorahost_module_flags"


def apply_patches() -> None:
    """Keeps the flags up to date whenever an adapter enters a slot."""
    patch(LoRAModelManager, "activate_adapter", activate_adapter)


def flags_of(lora_a: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """int32 (slots + 1,) of the module whose first lora_a buffer this is; `otherwise` where it has none yet."""
    return _flags.get(lora_a.data_ptr(), otherwise)


def activate_adapter(self: Any, lora_id: int) -> bool:
    """See `LoRAModelManager.activate_adapter`."""
    entered: bool = original(LoRAModelManager, "activate_adapter")(self, lora_id)
    if entered:
        mark(self, lora_id)
    return entered


# vLLM activates some adapters in inference mode and some outside; a tensor made inside can't be written outside
@torch.inference_mode()
def mark(manager: Any, lora_id: int) -> None:
    """Writes the flags of the adapter's slot, for all dense modules in one copy."""
    dense = {n: m for n, m in manager.modules.items() if isinstance(m, BaseLinearLayerWithLoRA)}
    if not dense:
        return
    table = getattr(manager, TABLE, None)
    if table is None:
        first = next(iter(dense.values())).lora_a_stacked[0]
        table = torch.zeros(len(dense), manager.lora_slots + 1, dtype=torch.int32, device=first.device)
        setattr(manager, TABLE, table)
        for row, module in zip(table, dense.values(), strict=True):
            _flags[module.lora_a_stacked[0].data_ptr()] = row
    adapter = manager.list_adapters()[lora_id]
    touched = [int(bool(manager._get_lora_layer_weights(adapter, name))) for name in dense]
    table[:, manager.lora_index_to_id.index(lora_id)] = torch.tensor(touched, dtype=torch.int32, device=table.device)
