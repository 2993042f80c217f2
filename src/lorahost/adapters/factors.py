"""Reads pairs of an adapter as LoRA factors in the target format, with the true scale folded into B."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from lorahost.adapters.layout import ExpertTarget, Role
from lorahost.adapters.matching import ExpertPairs, Pair
from lorahost.adapters.orientation import StackedPart
from lorahost.adapters.peft_config import ScaleRules
from lorahost.adapters.source import AdapterTensors
from lorahost.adapters.tensors import (
    Bits,
    Dtype,
    TensorInfo,
    all_finite,
    any_nonzero,
    bits_dtype,
    convert,
)
from lorahost.errors import AdapterRejectedError


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of a linear layer, or of all experts' projection of one role, is B·A.

    Attributes:
        a: (r, in), or (E, r, in) for experts; bits of the target format.
        b: (out, r), or (E, out, r); may be a strided view.
    """

    a: Bits
    b: Bits

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    def has_effect(self) -> bool:
        """Whether B·A is non-zero: some rank whose row of A and whose column of B both have a non-zero value."""
        return bool((any_nonzero(self.a, axis=-1) & any_nonzero(self.b, axis=-2)).any())


class FactorReader:
    """Reads factors from an adapter's tensors.

    Args:
        tensors: The adapter.
        scales: Its scale rules.
        dtype: Format of the factors.
    """

    def __init__(self, tensors: AdapterTensors, scales: ScaleRules, dtype: Dtype) -> None:
        self._tensors = tensors
        self._scales = scales
        self._dtype: Dtype = dtype
        self._used: Counter[float] = Counter()

    def notes(self) -> list[str]:
        """Which scales were folded in, and how often."""
        formula = self._scales.formula()
        lines = [f"{formula} = {scale:g} on {n} modules" for scale, n in self._used.most_common(8)]
        hidden = len(self._used) - len(lines)
        return lines + ([f"and {hidden} more scales"] if hidden > 0 else [])

    def dense(self, pair: Pair) -> Factors:
        """Factors of a linear layer."""
        scale = self._scale(pair, pair.rank)
        return Factors(self._read(pair.a), self._read(pair.b, scale))

    def stacked(self, target: ExpertTarget, part: StackedPart, source: str) -> Factors:
        """Factors of a stacked pair: A is expert-major in its rows, B rank-major in its columns."""
        parameter = "down_proj" if part.role == "down" else "gate_up_proj"
        scale = self._scale(part.pair, part.rank, module=source, parameter=parameter)
        experts, rank = target.num_experts, part.rank
        rows = self._read(part.pair.a, scale if part.swapped else 1.0).reshape(experts, rank, -1)
        columns = self._read(part.pair.b, 1.0 if part.swapped else scale)
        columns = columns.reshape(columns.shape[0], rank, experts).transpose(2, 0, 1)
        if part.swapped:
            return Factors(columns.swapaxes(1, 2), rows.swapaxes(1, 2))
        return Factors(rows, columns)

    def per_expert(self, target: ExpertTarget, pairs: ExpertPairs, role: Role) -> Factors | None:
        """Factors of one role; experts without LoRA, and ranks beyond an expert's own, are zero."""
        found = [(e, p) for e in range(target.num_experts) if (p := pairs.per_expert.get((role, e)))]
        if not found:
            return None
        rank = max(p.rank for _, p in found)
        n_in, n_out = target.features(role)
        scales = [self._scale(p, p.rank) for _, p in found]
        a = self._assemble([(e, p.a) for e, p in found], [1.0] * len(found), (target.num_experts, rank, n_in))
        b = self._assemble([(e, p.b) for e, p in found], scales, (target.num_experts, n_out, rank))
        return Factors(a, b)

    def _assemble(self, parts: list[tuple[int, TensorInfo]], scales: list[float], shape: tuple[int, int, int]) -> Bits:
        """Stacks 2D tensors into zeros of `shape`, each at the start of its expert's matrix."""
        views = [(e, info, *self._tensors.bits(info.name)) for e, info in parts]
        dtype = views[0][3]
        # One conversion of the whole block is far cheaper than thousands of small ones.
        if len(set(scales)) == 1 and all(d == dtype for *_, d in views):
            block = np.zeros(shape, bits_dtype(dtype))
            for e, _, bits, _ in views:
                block[e, : bits.shape[0], : bits.shape[1]] = bits
            if all_finite(block, dtype):
                return self._convert(block, dtype, scales[0], parts[0][1].name)
        result = np.zeros(shape, bits_dtype(self._dtype))
        for (e, info, bits, _), scale in zip(views, scales, strict=True):
            result[e, : bits.shape[0], : bits.shape[1]] = self._read(info, scale)
        return result

    def _read(self, info: TensorInfo, scale: float = 1.0) -> Bits:
        bits, dtype = self._tensors.bits(info.name)
        if not all_finite(bits, dtype):
            raise AdapterRejectedError(
                f"{info.name} contains NaN or infinity; all values must be finite", code="not_finite"
            )
        return self._convert(bits, dtype, scale, info.name)

    def _convert(self, bits: Bits, dtype: Dtype, scale: float, name: str) -> Bits:
        result = convert(bits, dtype, self._dtype, scale)
        if result is not bits and not all_finite(result, self._dtype):
            raise AdapterRejectedError(
                f"{name} times its scale {scale:g} exceeds the range of {self._dtype}", code="overflow"
            )
        return result

    def _scale(self, pair: Pair, rank: int, *, module: str | None = None, parameter: str | None = None) -> float:
        scale = self._scales.scale(module or pair.module, rank, parameter=parameter)
        self._used[scale] += 1
        return scale
