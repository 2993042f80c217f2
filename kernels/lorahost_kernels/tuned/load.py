"""Finds the tuned configuration files of a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "LORAHOST_CONFIG_DIR"


def gpu_key(name: str) -> str:
    """A GPU's name as part of a path: `NVIDIA_H200`; vLLM names its files in the same way."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def folder(environ: Mapping[str, str]) -> Path | None:
    """LORAHOST_CONFIG_DIR, else the folder in the package, else the checkout's; None where there is none."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    package = Path(__file__).resolve().parents[1]
    for place in (package / "tuned_configs", package.parents[1] / "tuned_configs"):
        if place.is_dir():
            return place
    return None


def files(where: Path, gpu: str) -> list[Path]:
    """The files for a GPU: `GPU.json` and `GPU/*.json`, sorted by name."""
    key = gpu_key(gpu)
    return [p for p in (where / f"{key}.json", *sorted((where / key).glob("*.json"))) if p.is_file()]
