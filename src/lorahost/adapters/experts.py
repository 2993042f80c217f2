"""The experts of one layer in the form that the engine loads: per expert, or PEFT's stacked matrices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lorahost.adapters.factors import Factors
from lorahost.adapters.layout import ExpertTarget, Role
from lorahost.adapters.matching import ExpertPairs
from lorahost.adapters.source import AdapterTensors
from lorahost.adapters.tensors import Bits, Dtype, SafetensorsWriter, bits_dtype

PREFIX = "base_model.model."
_ROLES: tuple[Role, ...] = ("gate", "up", "down")


def rank_needed(target: ExpertTarget, pairs: ExpertPairs, tensors: AdapterTensors) -> int:
    """Canonical rank of per-expert pairs.

    In one stacked gate_up matrix, gate and up keep their ranks apart (block-combined), unless they share A.
    """
    ranks = {role: [p.rank for (r, _), p in pairs.per_expert.items() if r == role] for role in _ROLES}
    gate, up, down = (max(ranks[role], default=0) for role in _ROLES)
    if target.form == "stacked" and gate and up and not _shares_a(pairs, tensors):
        return max(gate + up, down)
    return max(gate, up, down)


def _shares_a(pairs: ExpertPairs, tensors: AdapterTensors) -> bool:
    """Whether gate and up have the same lora_A in every expert."""
    gates = {e: p for (role, e), p in pairs.per_expert.items() if role == "gate"}
    ups = {e: p for (role, e), p in pairs.per_expert.items() if role == "up"}
    return gates.keys() == ups.keys() and all(
        gates[e].a.tag == ups[e].a.tag
        and np.array_equal(tensors.bits(gates[e].a.name)[0], tensors.bits(ups[e].a.name)[0])
        for e in gates
    )


def write_experts(
    writer: SafetensorsWriter,
    target: ExpertTarget,
    factors: Mapping[Role, Factors],
    rank: int,
    dtype: Dtype,
) -> list[str]:
    """Writes one layer's experts at `rank`, with zeros for what is missing.

    Args:
        factors: Either gate_up or gate and up, and down; each may be missing.

    Returns:
        The ids of the projections whose B·A is non-zero; with none, nothing is written.
    """
    effective = {role: f for role, f in factors.items() if f.has_effect()}
    if not effective:
        return []
    if target.form == "stacked":
        _write_stacked(writer, target, _to_stacked(target, effective), rank, dtype)
    else:
        _write_per_expert(writer, target, _to_per_expert(target, effective), rank, dtype)
    ids = [target.gate_up_id] if effective.keys() & {"gate", "up", "gate_up"} else []
    return ids + ([target.down_id] if "down" in effective else [])


def expert_names(target: ExpertTarget) -> list[str]:
    """All tensor names that `write_experts` may write."""
    if target.form == "stacked":
        modules = [f"{target.canonical}.base_layer", target.canonical]
    else:
        modules = [f"{target.canonical}.{e}.{target.names[role]}" for role in _ROLES for e in range(target.num_experts)]
    return [tensor_name(m, half) for m in modules for half in "AB"]


def tensor_name(module: str, half: str) -> str:
    """Name of lora_A or lora_B of `module` in the normalised adapter."""
    return f"{PREFIX}{module}.lora_{half}.weight"


def _rows(target: ExpertTarget) -> tuple[slice, slice]:
    """Rows of gate and of up in a stacked gate_up matrix."""
    if target.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, target.intermediate), slice(target.intermediate, None)


def _to_per_expert(target: ExpertTarget, factors: Mapping[Role, Factors]) -> dict[Role, Factors]:
    """gate_up split into gate and up, which use the same A."""
    result = dict(factors)
    if both := result.pop("gate_up", None):
        for role, rows in zip(_ROLES, _rows(target), strict=False):
            result[role] = Factors(both.a, both.b[:, rows])
    return result


def _to_stacked(target: ExpertTarget, factors: Mapping[Role, Factors]) -> dict[Role, Factors]:
    """gate and up joined into gate_up: A of both, B block-diagonal in the rank; one A when it is shared."""
    result = dict(factors)
    halves = [(rows, result.pop(role, None)) for role, rows in zip(_ROLES, _rows(target), strict=False)]
    present = [(rows, f) for rows, f in halves if f is not None]
    if not present:
        return result
    first = present[0][1]
    shared = all(np.array_equal(f.a, first.a) for _, f in present)
    rank = first.rank if shared else sum(f.rank for _, f in present)
    a = first.a if shared else np.concatenate([f.a for _, f in present], axis=1)
    b = np.zeros((target.num_experts, 2 * target.intermediate, rank), first.b.dtype)
    start = 0
    for rows, f in present:
        b[:, rows, start : start + f.rank] = f.b
        start += 0 if shared else f.rank
    result["gate_up"] = Factors(a, b)
    return result


def _write_per_expert(
    writer: SafetensorsWriter,
    target: ExpertTarget,
    factors: Mapping[Role, Factors],
    rank: int,
    dtype: Dtype,
) -> None:
    experts = range(target.num_experts)
    for role in _ROLES:
        n_in, n_out = target.features(role)
        f = factors.get(role)
        a = pad(f.a if f else None, (len(experts), rank, n_in), dtype)
        b = pad(f.b if f else None, (len(experts), n_out, rank), dtype)
        modules = [f"{target.canonical}.{e}.{target.names[role]}" for e in experts]
        writer.write_each([tensor_name(m, "A") for m in modules], a)
        writer.write_each([tensor_name(m, "B") for m in modules], b)


def _write_stacked(
    writer: SafetensorsWriter,
    target: ExpertTarget,
    factors: Mapping[Role, Factors],
    rank: int,
    dtype: Dtype,
) -> None:
    experts = target.num_experts
    roles: tuple[tuple[Role, str], ...] = (
        ("gate_up", f"{target.canonical}.base_layer"),
        ("down", target.canonical),
    )
    for role, module in roles:
        n_in, n_out = target.features(role)
        f = factors.get(role)
        a = pad(f.a if f else None, (experts, rank, n_in), dtype)
        # Columns of B are rank-major: (out, r, E).
        b = pad(f.b.transpose(1, 2, 0) if f else None, (n_out, rank, experts), dtype)
        writer.write(tensor_name(module, "A"), a.reshape(experts * rank, n_in))
        writer.write(tensor_name(module, "B"), b.reshape(n_out, rank * experts))


def pad(bits: Bits | None, shape: tuple[int, ...], dtype: Dtype) -> Bits:
    """`bits` in the leading corner of zeros of `shape`; C-contiguous."""
    if bits is not None and bits.shape == shape:
        return np.ascontiguousarray(bits)
    result = np.zeros(shape, bits_dtype(dtype))
    if bits is not None:
        result[tuple(slice(n) for n in bits.shape)] = bits
    return result
