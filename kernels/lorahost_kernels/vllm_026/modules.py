"""Which modules hold LoRA weights, in the words that the adapter importer uses too.

Dense modules go by their unfused engine name (`model.layers.0.self_attn.q_proj`), experts by
`<experts module>.gate_up` and `<experts module>.down`.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

Factors = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]


def wrapped_modules(manager: Any) -> list[str]:
    """Every module that can hold LoRA weights, sorted; `manager` is vLLM's LoRAModelManager."""
    names: set[str] = set()
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA):
            names.update((f"{name}.gate_up", f"{name}.down"))
        else:
            names.update(_part_names(manager, name, module))
    return sorted(names)


def adapter_modules(manager: Any, engine_id: int) -> list[str]:
    """Modules whose two LoRA factors are both non-zero, sorted, for a loaded adapter.

    Where the adapter is active, the slot's buffers on the device are what is read, since they are what is served.

    Raises:
        KeyError: the adapter is not loaded.
        RuntimeError: the slot holds something else than the host copy.
    """
    lora = manager.list_adapters().get(engine_id)
    if lora is None:
        raise KeyError(f"engine_id {engine_id} is not loaded; loaded are {sorted(manager.list_adapters())}")
    host = _nonzero(manager, lambda name, module: _host_factors(lora, name, module))
    if engine_id not in manager.lora_index_to_id:
        return sorted(host)
    slot = manager.lora_index_to_id.index(engine_id)
    device = _nonzero(manager, lambda name, module: _slot_factors(module, slot))
    # Under tensor parallelism a worker's shard may be zero where the whole factor isn't, never the other way round.
    sharded = any(getattr(module, "tp_size", 1) > 1 for module in manager.modules.values())
    if device - host or (host - device and not sharded):
        raise RuntimeError(
            f"slot {slot} does not hold the weights of engine_id {engine_id}: only in the slot "
            f"{sorted(device - host)}, only in the host copy {sorted(host - device)}"
        )
    return sorted(device)


def _part_names(manager: Any, name: str, module: Any) -> list[str]:
    """Unfused names of a dense module's slices, in slice order; its own name where it isn't packed."""
    parts: list[str] = manager.packed_modules.get(name, [name])
    return parts if len(parts) == len(_as_tuple(module.lora_a_stacked)) else [name]


def _nonzero(manager: Any, factors_of: Any) -> set[str]:
    found: set[str] = set()
    for name, module in manager.modules.items():
        factors: Factors = factors_of(name, module)
        if isinstance(module, FusedMoEWithLoRA):
            found.update(f"{name}.{part}" for part in _nonzero_experts(factors))
            continue
        parts = _part_names(manager, name, module)
        for index, (a, b) in enumerate(factors):
            if _both_nonzero(a, b):
                found.add(parts[index] if len(parts) > 1 else parts[0])
    return found


def _nonzero_experts(factors: Factors) -> Iterator[str]:
    """`gate_up` and `down`; the factors are (gate, down, up) or (gate_up, down), each with an expert dimension."""
    for index, (a, b) in enumerate(factors):
        if _both_nonzero(a, b):
            yield "down" if index == 1 else "gate_up"


def _both_nonzero(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether some expert (or the module) has both factors non-zero; the factors are the last two dimensions."""
    if a is None or b is None:
        return False
    both = (a != 0).flatten(-2).any(-1) & (b != 0).flatten(-2).any(-1)
    return bool(both.any())


def _host_factors(lora: Any, name: str, module: Any) -> Factors:
    weights = lora.loras.get(name)
    if weights is None:
        return []
    if isinstance(weights.lora_a, list):
        return list(zip(weights.lora_a, weights.lora_b, strict=True))
    return [(weights.lora_a, weights.lora_b)]


def _slot_factors(module: Any, slot: int) -> Factors:
    if isinstance(module, FusedMoEWithLoRA):
        a13, b13 = module.w13_lora_a_stacked, module.w13_lora_b_stacked
        down = (module.w2_lora_a_stacked[0][slot], module.w2_lora_b_stacked[0][slot])
        gate_up = [(a[slot], b[slot]) for a, b in zip(a13, b13, strict=True)]
        return [gate_up[0], down, *gate_up[1:]]
    stacked = zip(_as_tuple(module.lora_a_stacked), _as_tuple(module.lora_b_stacked), strict=True)
    return [(a[slot].flatten(0, -2), b[slot].flatten(0, -2)) for a, b in stacked]


def _as_tuple(stacked: Any) -> tuple[torch.Tensor, ...]:
    return (stacked,) if isinstance(stacked, torch.Tensor) else tuple(stacked)
