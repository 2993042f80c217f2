"""Merges an adapter into its base model, tensor by tensor, with numpy alone."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorahost.adapters import chat_template
from lorahost.adapters.importer import ImportLimits, import_adapter
from lorahost.adapters.layout import ModelLayout
from lorahost.adapters.tensors import Dtype, SafetensorsFile, TensorInfo, from_float32, to_float32
from lorahost.errors import HostError
from lorahost_deploy import console
from lorahost_deploy.bedrock.deltas import Deltas
from lorahost_deploy.bedrock.tensors import Entry, Floats, from_mxfp4, write
from lorahost_deploy.errors import DeployError

LIMITS = ImportLimits(max_rank=4096, max_bytes=1 << 40, dtype="float32")
INDEX = "model.safetensors.index.json"
BLOCKS, SCALES = "_blocks", "_scales"
FLOATS: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def merge(model: Path, adapter: Path, into: Path) -> None:
    """Writes the base model with the adapter's change into the new directory `into`, all or nothing.

    Each tensor keeps its format and is rounded once. MXFP4 experts become bfloat16.

    Raises:
        DeployError: the adapter can't be served on the base, the base is quantised in another way than MXFP4, or its
            checkpoint lacks a tensor that the adapter changes.
    """
    if into.exists():
        raise DeployError(f"--out {into} exists already")
    config = _config(model)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".merging-") as scratch:
        try:
            layout = ModelLayout.from_config(config, internal_router_lora=True)
            import_adapter(adapter, Path(scratch) / "adapter", layout, LIMITS)
            merged = Path(scratch) / "merged"
            merged.mkdir()
            _Merge(model, Deltas(Path(scratch) / "adapter", layout), merged).run()
            _copy_rest(model, merged, config)
            chat_template.carry(adapter, merged)
        except HostError as error:
            raise DeployError(f"{adapter} on {model}: {error.message} [{error.code}]") from error
        merged.rename(into)


def _config(model: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DeployError(f"--model {model}: no readable config.json: {error}") from error
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4"):
        raise DeployError(
            f"--model {model} is quantised with {method!r}; only MXFP4 and plain weights can be merged into"
        )
    return config


def _copy_rest(model: Path, merged: Path, config: dict[str, Any]) -> None:
    """Tokenizer, template and the like; the configuration without its quantisation."""
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", INDEX):
            shutil.copy2(path, merged / path.name)
    if config.pop("quantization_config", None):
        config["dtype" if "dtype" in config else "torch_dtype"] = "bfloat16"
    (merged / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class _Merge:
    """One merge; the base's files are mapped, and read a tensor or an expert at a time."""

    def __init__(self, model: Path, deltas: Deltas, merged: Path) -> None:
        self._deltas = deltas
        self._merged = merged
        self._shards = {path.name: SafetensorsFile(path) for path in sorted(model.glob("*.safetensors"))}
        if not self._shards:
            raise DeployError(f"--model {model}: no safetensors in it")
        self._where = {name: file for file in self._shards.values() for name in file.infos}
        self._used: set[str] = set()

    def run(self) -> None:
        """Writes all shards and their index."""
        shards = {name: self._entries(file) for name, file in self._shards.items()}
        if missing := sorted(self._deltas.units - self._used):
            raise DeployError(
                f"the base model's checkpoint has no tensor for {len(missing)} modules of the adapter: "
                f"{', '.join(missing[:5])}"
            )
        index = {}
        for name, entries in shards.items():
            console.say(f"{name}: {len(entries)} tensors, {sum(e.size for e in entries) / 1e9:.2f} GB")
            write(self._merged / name, entries, (self._pieces(entry) for entry in entries))
            index.update({entry.name: name for entry in entries})
        if len(shards) > 1:
            total = sum(entry.size for entries in shards.values() for entry in entries)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (self._merged / INDEX).write_text(text + "\n")

    def _entries(self, file: SafetensorsFile) -> list[Entry]:
        """What becomes of a shard's tensors."""
        entries = []
        for info in file.infos.values():
            if info.name.endswith(SCALES) and _stem(info.name) + BLOCKS in self._where:
                continue
            entry = self._unpacked(info) if info.name.endswith(BLOCKS) else _same(info)
            if delta := self._deltas.by_name.get(entry.name):
                if entry.tag not in FLOATS:
                    raise DeployError(
                        f"{entry.name} has format {entry.tag}; an adapter can be merged into {', '.join(FLOATS)}"
                    )
                self._used.add(delta.unit)
            entries.append(entry)
        return entries

    def _unpacked(self, info: TensorInfo) -> Entry:
        """MXFP4 blocks (E, out, blocks, 16) as bfloat16 (E, in, out)."""
        name = _stem(info.name)
        if name + SCALES not in self._where or len(info.shape) != 4 or info.shape[3] != 16:
            raise DeployError(f"{info.name} {list(info.shape)} is no MXFP4 of experts with its {SCALES}")
        experts, out, blocks, _ = info.shape
        shape = (experts, blocks * 32, out)
        return Entry(name, "BF16", shape, 2 * int(np.prod(shape)))

    def _pieces(self, entry: Entry) -> Iterator[NDArray[Any]]:
        delta = self._deltas.by_name.get(entry.name)
        packed = entry.name not in self._where
        if delta is None and not packed:
            yield self._raw(entry.name)
            return
        dtype = FLOATS[entry.tag]
        parts = self._packed(entry.name) if packed else self._floats(entry)
        changes = delta.parts() if delta else None
        for part in parts:
            change = None if changes is None else next(changes)
            if change is not None and change.shape != part.shape:
                raise DeployError(f"{entry.name}: the base has {part.shape}, the adapter changes {change.shape}")
            summed = part if change is None else part + change
            yield from_float32(np.ascontiguousarray(summed, np.float32), dtype)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        file = self._where[name]
        info = file.infos[name]
        return (
            np.memmap(file.path, np.uint8, "r", info.start, (info.end - info.start,))
            if info.end > info.start
            else _EMPTY
        )

    def _floats(self, entry: Entry) -> Iterator[Floats]:
        """A plain tensor: one matrix, or one for each expert."""
        file = self._where[entry.name]
        bits, dtype = file.bits(file.infos[entry.name])
        for part in bits if bits.ndim == 3 else [bits]:
            yield to_float32(part, dtype)

    def _packed(self, name: str) -> Iterator[Floats]:
        """MXFP4 experts, one (in, out) matrix at a time."""
        blocks = self._raw(name + BLOCKS).reshape(self._where[name + BLOCKS].infos[name + BLOCKS].shape)
        scales = self._raw(name + SCALES).reshape(self._where[name + SCALES].infos[name + SCALES].shape)
        for e in range(len(blocks)):
            yield from_mxfp4(blocks[e], scales[e]).T


_EMPTY = np.empty(0, np.uint8)


def _same(info: TensorInfo) -> Entry:
    return Entry(info.name, info.tag, info.shape, info.end - info.start)


def _stem(name: str) -> str:
    return re.sub(f"({BLOCKS}|{SCALES})$", "", name)
