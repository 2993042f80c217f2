"""Which modules the resident adapters hold weights for, so that modules without any cost little.

vLLM keeps such a flag for experts only, and multiplies by the zeros of an untouched module. A dense module's flags, one
for each slot, lie on the device: CUDA graphs that were captured before an adapter came read what it brought, and rows
of an adapter without weights there cost no memory traffic. `graph_nodes` leaves out a module that no adapter touches.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from lorahost_kernels.vllm_026 import graph_nodes
from lorahost_kernels.vllm_026.patching import original, patch

# by the address of a module's first lora_a buffer, which stays where it is as long as the engine runs
_flags: dict[int, torch.Tensor] = {}
TABLE = "_lorahost_module_flags"
TOUCHED = "_lorahost_touched"
KEYS = "_lorahost_keys"
MOE_BUFFERS = ("w13_lora_a_stacked", "w2_lora_a_stacked")


def apply_patches() -> None:
    """Keeps track whenever an adapter enters or leaves a slot."""
    patch(LoRAModelManager, "activate_adapter", activate_adapter)
    patch(LoRAModelManager, "_deactivate_adapter", deactivate_adapter)


def flags_of(lora_a: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """int32 (slots + 1,) of the module whose first lora_a buffer this is; `otherwise` where it has none yet."""
    return _flags.get(lora_a.data_ptr(), otherwise)


def activate_adapter(self: Any, lora_id: int) -> bool:
    """See `LoRAModelManager.activate_adapter`."""
    entered: bool = original(LoRAModelManager, "activate_adapter")(self, lora_id)
    if entered:
        mark(self, lora_id)
        # a slot's adapter may have been put in anew under the same id
        vars(self).get(TOUCHED, {}).pop(lora_id, None)
        follow_slots(self)
    return entered


def deactivate_adapter(self: Any, lora_id: int) -> None:
    """See `LoRAModelManager._deactivate_adapter`."""
    original(LoRAModelManager, "_deactivate_adapter")(self, lora_id)
    follow_slots(self)


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


def follow_slots(manager: Any) -> None:
    """Tells `graph_nodes` which modules the adapters in the manager's slots touch; nothing where it doesn't ask."""
    if graph_nodes.state.driver is None:
        return
    found: dict[int, frozenset[int]] = vars(manager).setdefault(TOUCHED, {})
    slots = {lora_id for lora_id in manager.lora_index_to_id if lora_id is not None}
    for gone in found.keys() - slots:
        del found[gone]
    adapters = manager.list_adapters()
    for lora_id in slots - found.keys():
        modules = [m for name, m in manager.modules.items() if touches(manager, adapters.get(lora_id), name)]
        found[lora_id] = frozenset(key for module in modules for key in keys_of(module))
    if not hasattr(manager, KEYS):
        known = frozenset(key for module in manager.modules.values() for key in keys_of(module))
        served = (module for module in manager.modules.values() if serves_other_ranks(module))
        setattr(manager, KEYS, (known, frozenset(key for module in served for key in keys_of(module))))
    known, always = getattr(manager, KEYS)
    graph_nodes.set_touched(known, always.union(*found.values()))


def touches(manager: Any, adapter: Any, name: str) -> bool:
    """Whether an adapter may have weights for a module; one that the manager doesn't know may have any."""
    return adapter is None or bool(manager._get_lora_layer_weights(adapter, name))


def keys_of(module: Any) -> list[int]:
    """What `graph_nodes.run_for` may know the module's products by: the addresses of its lora_a buffers."""
    names = ("lora_a_stacked",) if isinstance(module, BaseLinearLayerWithLoRA) else MOE_BUFFERS
    return [a.data_ptr() for name in names for a in getattr(module, name, ())]


def serves_other_ranks(module: Any) -> bool:
    """Whether rows of other ranks' requests, with these ranks' slots, come to the module."""
    experts = getattr(module, "moe_config", None)
    return experts is not None and experts.dp_size > 1
