"""What an engine's worker calls once: finds the files for its GPU and model, and makes the process use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorahost_kernels.tuned import active, load, vllm_format
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import ModelShape, ShapeError, from_config, sharded
from lorahost_kernels.tuned.table import Table

log = logging.getLogger("vllm.lorahost")


@dataclass(frozen=True)
class Device:
    """A GPU: its name, compute capability, multiprocessors, bytes of shared memory that one program may have."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_limit: int

    @property
    def defaults(self) -> str:
        """What the defaults are for GPUs of its class."""
        pdl = "with PDL" if self.capability >= (9, 0) else "no PDL"
        share = f"programs for {self.multiprocessors} multiprocessors"
        return f"sm_{self.capability[0]}{self.capability[1]}, {pdl}, {share}, {self.shared_limit // 1024} KiB shared"


def this_device() -> Device:
    """The GPU that torch uses now."""
    import torch

    p: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(p.name, (p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin)


def load_table(
    device: Device, shape: ModelShape, slots: int, environ: Mapping[str, str], fused: bool = False
) -> tuple[Table, dict[str, Any]]:
    """The points for a GPU and a model, and notes: the folders, and the files that were refused and why."""
    table = Table(device.name, shape, slots, fused)
    where = load.folder(environ)
    notes: dict[str, Any] = {"folder": str(where) if where else "", "refused": []}
    if where and environ.get(load.VARIABLE) and not where.is_dir():
        notes["refused"].append(f"{load.VARIABLE}={where} is no directory")
    for path in load.files(where, device.name) if where else []:
        try:
            file = read(path)
            if load.gpu_key(file.gpu) != load.gpu_key(device.name):
                raise ConfigError(f"{path}: gpu is {file.gpu!r}, this one is {device.name!r}")
            table.add_file(file, path.name)
        except ConfigError as error:
            notes["refused"].append(str(error))
    folder = environ.get(vllm_format.VARIABLE)
    if folder:
        warnings = vllm_format.add(table, folder)
        notes["vllm_folder"], notes["vllm_warnings"] = folder, warnings
    return table, notes


def start(
    config: Mapping[str, Any],
    slots: int,
    tensor_parallel: int = 1,
    device: Device | None = None,
    environ: Mapping[str, str] | None = None,
    fused: bool = False,
) -> dict[str, Any]:
    """Makes this process use the tuned configurations of its GPU and model; returns `report()`.

    Nothing here stops an engine: a file that is refused, or a model that is not known, is logged and the defaults
    are used.

    Args:
        config: The model's `config.json`.
        slots: Adapter slots of the engine (max_loras).
        tensor_parallel: GPUs that share the model's layers.
        device: The GPU; the current one by default.
        environ: Variables; the process's by default.
        fused: Whether the experts run the expands that take over the activation and the sum over experts.
    """
    active.deactivate()
    device = device or this_device()
    try:
        shape = sharded(from_config(config, str(config.get("model_type", "model"))), tensor_parallel)
    except ShapeError as error:
        log.warning("lorahost: no tuned configurations, defaults (%s): %s", device.defaults, error)
        return active.report()
    table, notes = load_table(device, shape, slots, os.environ if environ is None else environ, fused)
    active.activate(table, device.shared_limit, notes)
    found = active.report()
    for line in log_lines(device, found):
        log.info(line)
    for refused in notes["refused"]:
        log.error("lorahost: tuned configuration refused: %s", refused)
    for warning in notes.get("vllm_warnings", []):
        log.warning("lorahost: %s", warning)
    return found


def log_lines(device: Device, found: Mapping[str, Any]) -> list[str]:
    """A line for each operation."""
    lines = []
    for op, has in found["operations"].items():
        # families that an engine has by itself need no name
        rows = "rows" if has["family"] == "dense" or not found["fused"] else f"{has['family']} rows"
        if has["source"] == "default":
            lines.append(f"lorahost {op}: defaults ({device.defaults}), no {rows} for {device.name} and this shape")
        else:
            sizes = f"M={has['tokens'][0]}..{has['tokens'][-1]}"
            ranks = ", ".join(map(str, has["ranks"]))
            files = ", ".join(has["files"])
            lines.append(f"lorahost {op}: {has['source']}, {has['rows']} {rows}, {sizes}, ranks {ranks} ({files})")
    return lines
