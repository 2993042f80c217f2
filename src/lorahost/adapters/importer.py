"""Turns any LoRA adapter that vLLM 0.26.0 can serve into the one form that it serves correctly.

The normalised directory has adapter_config.json (r, lora_alpha == r, no patterns) and adapter_model.safetensors:
the true scale is folded into B, every module has the same rank, experts are per expert or stacked as the model
class needs, and missing experts and projections are zeros. Anything whose effect would be lost is refused.

The module ids in `ImportReport.modules` are the vocabulary in which the workers report what they hold; see
`lorahost.adapters.layout`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, field_serializer

from lorahost.adapters.experts import expert_names, pad, rank_needed, tensor_name, write_experts
from lorahost.adapters.factors import FactorReader, Factors
from lorahost.adapters.layout import ExpertTarget, ModelLayout, Role
from lorahost.adapters.matching import ExpertPairs, Matched, match
from lorahost.adapters.orientation import StackedPart, resolve
from lorahost.adapters.peft_config import PeftConfig
from lorahost.adapters.source import CONFIG, WEIGHTS, AdapterTensors, digest_of, find_files
from lorahost.adapters.tensors import Dtype, SafetensorsWriter, bits_dtype
from lorahost.errors import AdapterConflictError, AdapterRejectedError

__all__ = ["ImportLimits", "ImportReport", "digest_of", "import_adapter", "staging_path"]


class ImportLimits(BaseModel, frozen=True):
    """What the server can take.

    Attributes:
        max_rank: The engine's max_lora_rank.
        max_bytes: Most bytes of the adapter's files, and of the normalised tensors.
        dtype: Format of the normalised tensors; the engine's LoRA dtype.
    """

    max_rank: int
    max_bytes: int
    dtype: Dtype


class ImportReport(BaseModel, frozen=True):
    """What became of an adapter.

    Attributes:
        rank: Rank of every normalised pair.
        modules: Ids of the modules whose B·A is not zero; a sorted list in JSON.
        source_format: What was found, joined by `+`: `dense`, `experts-per-expert`, `experts-stacked`,
            `experts-stacked-swapped`.
        scale_notes: The scales that were folded in.
        warnings: Things that a person may want to know.
        bytes: Size of the normalised tensors.
        parameters: Number of values in the normalised tensors, zeros included.
    """

    rank: int
    modules: frozenset[str]
    source_format: str
    scale_notes: list[str]
    warnings: list[str]
    bytes: int
    parameters: int

    @field_serializer("modules")
    def _sorted(self, modules: frozenset[str]) -> list[str]:
        return sorted(modules)


def staging_path(target: Path, pid: int) -> Path:
    """Where the process `pid` prepares `target`."""
    return target.with_name(f".{target.name}.importing-{pid}")


def import_adapter(source: Path, target: Path, layout: ModelLayout, limits: ImportLimits) -> ImportReport:
    """Checks the adapter in `source` and writes its normalised form to `target`, all or nothing.

    Raises:
        AdapterRejectedError: it can't be served; `code` says why, the message has both sides.
        AdapterConflictError: `target` exists.
    """
    files = find_files(source)
    if files.size > limits.max_bytes:
        raise _too_large("the adapter's files have", files.size, limits)
    config = PeftConfig.read(files.config)
    job = _Import(config, AdapterTensors(files), layout, limits)
    if target.exists():
        raise AdapterConflictError(f"{target} exists already", code="target_exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_path(target, os.getpid())
    staging.mkdir()
    try:
        report = job.write(staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


@dataclass(frozen=True, slots=True)
class _Layer:
    """The experts of one layer, as found."""

    target: ExpertTarget
    pairs: ExpertPairs
    parts: list[StackedPart]


class _Import:
    """One adapter, matched and measured; nothing has been written yet."""

    def __init__(self, config: PeftConfig, tensors: AdapterTensors, layout: ModelLayout, limits: ImportLimits) -> None:
        self._limits = limits
        self._layout = layout
        self._matched: Matched = match(tensors.infos, layout)
        experts = list(self._matched.experts.values())
        parts, self._warnings = resolve(experts, config.peft_version)
        self._layers = [_Layer(t, p, parts.get(t.engine, [])) for t, p in experts]
        self._rank = self._canonical_rank(tensors)
        size = self._planned_values() * np.dtype(bits_dtype(limits.dtype)).itemsize
        if size > limits.max_bytes:
            raise _too_large(f"at rank {self._rank} in {limits.dtype} the adapter takes", size, limits)
        self._scales = config.scales()
        self._reader = FactorReader(tensors, self._scales, limits.dtype)

    def _canonical_rank(self, tensors: AdapterTensors) -> int:
        ranks = [(pair.rank, pair.module) for _, pair in self._matched.dense.values()]
        for layer in self._layers:
            ranks += [(part.rank, part.pair.module) for part in layer.parts]
            if layer.pairs.per_expert:
                ranks.append((rank_needed(layer.target, layer.pairs, tensors), layer.pairs.source))
        rank, module = max(ranks)
        if rank > self._limits.max_rank:
            raise AdapterRejectedError(
                f"the adapter has rank {rank} ({module}), but this server's max_lora_rank is {self._limits.max_rank}",
                code="rank_too_large",
                status=400,
                details={"rank": rank, "max_lora_rank": self._limits.max_rank, "module": module},
            )
        return rank

    def _planned_values(self) -> int:
        features = [t.in_features + t.out_features for t, _ in self._matched.dense.values()]
        for layer in self._layers:
            roles: tuple[Role, ...] = ("gate_up", "down") if layer.target.form == "stacked" else ("gate", "up", "down")
            features += [sum(layer.target.features(r)) * layer.target.num_experts for r in roles]
        return self._rank * sum(features)

    def write(self, directory: Path) -> ImportReport:
        """Writes both files into `directory`."""
        with SafetensorsWriter(directory / WEIGHTS, self._limits.dtype, self._names()) as writer:
            modules = [*self._write_dense(writer), *self._write_experts(writer)]
            size = writer.bytes_written
        if not modules:
            raise AdapterRejectedError(
                f"B·A is zero in all {self._module_count()} modules of the adapter, so it would change nothing; "
                "was it saved before training?",
                code="no_effect",
            )
        (directory / CONFIG).write_text(json.dumps(self._canonical_config(modules), indent=2) + "\n")
        idle = self._module_count() - len(modules)
        if idle:
            self._warnings.append(f"B·A is zero in {idle} of the adapter's {self._module_count()} modules")
        if unmatched := self._scales.unmatched():
            self._warnings.append(f"adapter_config.json: no module matches {', '.join(unmatched[:5])}")
        return ImportReport(
            rank=self._rank,
            modules=frozenset(modules),
            source_format=self._source_format(),
            scale_notes=self._reader.notes(),
            warnings=self._warnings,
            bytes=size,
            parameters=size // np.dtype(bits_dtype(self._limits.dtype)).itemsize,
        )

    def _names(self) -> Iterator[str]:
        for target, _ in self._matched.dense.values():
            yield from (tensor_name(target.canonical, half) for half in "AB")
        for layer in self._layers:
            yield from expert_names(layer.target)

    def _write_dense(self, writer: SafetensorsWriter) -> Iterator[str]:
        dtype = self._limits.dtype
        for target, pair in self._matched.dense.values():
            factors = self._reader.dense(pair)
            if factors.has_effect():
                a = pad(factors.a, (self._rank, target.in_features), dtype)
                b = pad(factors.b, (target.out_features, self._rank), dtype)
                writer.write(tensor_name(target.canonical, "A"), a)
                writer.write(tensor_name(target.canonical, "B"), b)
                yield target.engine

    def _write_experts(self, writer: SafetensorsWriter) -> Iterator[str]:
        for layer in self._layers:
            factors: dict[Role, Factors] = {
                part.role: self._reader.stacked(layer.target, part, layer.pairs.source) for part in layer.parts
            }
            roles: tuple[Role, ...] = ("gate", "up", "down")
            if not layer.parts:
                read = {role: self._reader.per_expert(layer.target, layer.pairs, role) for role in roles}
                factors = {role: f for role, f in read.items() if f is not None}
            yield from write_experts(writer, layer.target, factors, self._rank, self._limits.dtype)

    def _module_count(self) -> int:
        """Modules of the adapter, in the vocabulary of the report."""
        count = len(self._matched.dense)
        for layer in self._layers:
            roles = {part.role for part in layer.parts} | {role for role, _ in layer.pairs.per_expert}
            count += bool(roles & {"gate", "up", "gate_up"}) + ("down" in roles)
        return count

    def _source_format(self) -> str:
        found = {"dense"} if self._matched.dense else set()
        for layer in self._layers:
            if layer.pairs.per_expert:
                found.add("experts-per-expert")
            found |= {"experts-stacked-swapped" if p.swapped else "experts-stacked" for p in layer.parts}
        return "+".join(sorted(found))

    def _canonical_config(self, modules: list[str]) -> dict[str, object]:
        suffixes = {m.rpartition(".")[-1] for m in modules if m in self._matched.dense}
        for layer in self._layers:
            if {layer.target.gate_up_id, layer.target.down_id} & set(modules):
                stacked = layer.target.form == "stacked"
                suffixes |= {"experts"} if stacked else set(layer.target.names.values())
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._rank,
            "lora_alpha": self._rank,
            "target_modules": sorted(suffixes),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "inference_mode": True,
        }


def _too_large(what: str, size: int, limits: ImportLimits) -> AdapterRejectedError:
    return AdapterRejectedError(
        f"{what} {size} bytes, the limit is {limits.max_bytes}",
        code="artifact_too_large",
        details={"bytes": size, "max_bytes": limits.max_bytes},
    )
