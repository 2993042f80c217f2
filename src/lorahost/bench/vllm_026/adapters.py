"""Adapters with random weights for the benchmarks' models."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path

from lorahost.bench.files import write_whole
from lorahost.bench.shapes import Shape, adapter_config, adapter_matrices

B_STD = 0.002  # a trained adapter's change is small beside the base weights


def make_adapters(root: Path, shape: Shape, layers: int, rank: int, targets: tuple[str, ...], count: int) -> list[Path]:
    """Directories `a0` to `a<count-1>` of PEFT adapters below `root`; those of an earlier call are used again.

    All are one file of weights under several names, so reading them costs what the page cache costs. In the engine
    each fills a slot of its own.
    """
    key = hashlib.sha256(repr((shape.name, layers, rank, targets)).encode()).hexdigest()[:12]
    folder = root / f"adapters-{shape.name}-{key}"
    first = folder / "a0" / "adapter_model.safetensors"
    first.parent.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # engines that start at the same time share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(folder, first, shape, layers, rank, targets, count)


def _made(
    folder: Path, first: Path, shape: Shape, layers: int, rank: int, targets: tuple[str, ...], count: int
) -> list[Path]:
    if not first.is_file():
        partial = first.with_suffix(".partial")
        # in a process of its own: torch's threads would not survive when vLLM forks this one, and its child would hang
        matrices = adapter_matrices(shape, layers, rank, targets)
        writer = multiprocessing.get_context("spawn").Process(target=_write, args=(partial, matrices))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"the process that writes {first} ended with {writer.exitcode}")
        partial.replace(first)
    found = [folder / f"a{i}" for i in range(count)]
    for path in found:
        path.mkdir(exist_ok=True)
        write_whole(path / "adapter_config.json", json.dumps(adapter_config(shape, rank, targets)))
        weights = path / first.name
        if not weights.exists():
            try:
                os.link(first, weights)
            except OSError:  # a file system without hard links
                shutil.copyfile(first, weights)
    return found


def _write(path: Path, tensors: dict[str, tuple[int, int]]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, size in tensors.items():
        std = B_STD if ".lora_B." in name else size[1] ** -0.5
        values[name] = torch.empty(size, dtype=torch.float32).normal_(0.0, std, generator=generator).bfloat16()
    save_file(values, path)
