"""What a normalised adapter adds to each tensor of its base model's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorahost.adapters.experts import tensor_name
from lorahost.adapters.layout import ExpertTarget, ModelLayout, Role
from lorahost.adapters.source import WEIGHTS
from lorahost.adapters.tensors import SafetensorsFile, to_float32
from lorahost_deploy.bedrock.tensors import Floats

Parts = Callable[[], Iterator[Floats]]


@dataclass(frozen=True)
class Delta:
    """A change of one tensor.

    Attributes:
        unit: The adapter's module; the checkpoint has each under one of several names.
        parts: The change as float32 matrices; of stacked experts, one for each.
    """

    unit: str
    parts: Parts


class Deltas:
    """Changes by the checkpoint's tensor names.

    Args:
        adapter: A directory that `import_adapter` wrote in float32.
    """

    def __init__(self, adapter: Path, layout: ModelLayout) -> None:
        self._file = SafetensorsFile(adapter / WEIGHTS)
        self.by_name: dict[str, Delta] = {}
        for dense in layout.dense_targets():
            self._add(dense.canonical, [f"{alias}.weight" for alias in dense.aliases])
        for experts in layout.expert_targets():
            if experts.form == "stacked":
                self._add_stacked(experts)
            else:
                self._add_per_expert(experts)

    @property
    def units(self) -> set[str]:
        """All modules of the adapter."""
        return {delta.unit for delta in self.by_name.values()}

    def _add(self, module: str, names: list[str]) -> None:
        if tensor_name(module, "A") in self._file.infos:
            delta = Delta(module, lambda: iter([self._half(module, "B") @ self._half(module, "A")]))
            self.by_name.update(dict.fromkeys(names, delta))

    def _add_per_expert(self, target: ExpertTarget) -> None:
        roles: tuple[Role, ...] = ("gate", "up", "down")
        for role in roles:
            names = [name for name, meant in target.name_aliases.items() if meant == role]
            for e in range(target.num_experts):
                places = [f"{alias}.{e}.{name}.weight" for alias in target.aliases for name in names]
                self._add(f"{target.canonical}.{e}.{target.names[role]}", places)

    def _add_stacked(self, target: ExpertTarget) -> None:
        for module, name in ((f"{target.canonical}.base_layer", "gate_up_proj"), (target.canonical, "down_proj")):
            if tensor_name(module, "A") in self._file.infos:
                delta = Delta(module, lambda module=module: self._stacked(module, target))  # type: ignore[misc]
                self.by_name.update(dict.fromkeys([f"{alias}.{name}" for alias in target.aliases], delta))

    def _stacked(self, module: str, target: ExpertTarget) -> Iterator[Floats]:
        """(in, out) for each expert, as GPT-OSS keeps its weights; columns of B are rank-major."""
        a, b = self._half(module, "A"), self._half(module, "B")
        a = a.reshape(target.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, target.num_experts)
        for e in range(target.num_experts):
            change = b[:, :, e] @ a[e]
            yield change.T if target.transposed else change

    def _half(self, module: str, half: str) -> Floats:
        bits, dtype = self._file.bits(self._file.infos[tensor_name(module, half)])
        return np.ascontiguousarray(to_float32(bits, dtype))
