"""What vLLM's processes find in their environment: plugins, kernels, no network; standard library only."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

from lorahost.bench.files import write_whole
from lorahost.bench.point import Point

GROUP = "vllm.general_plugins"
WEIGHTS = "lorahost_bench_weights"
# not LORAHOST_*: the server refuses names of that prefix that it does not know
WEIGHTS_VARIABLE = "BENCH_WEIGHTS"
PLUGINS = {WEIGHTS: "lorahost.bench.vllm_026.weights:register", "lorahost": "lorahost_kernels.plugin:register"}


def prepare(point: Point, work: Path) -> None:
    """Sets this process's environment, which the engine's processes inherit; to be called before vLLM is imported.

    The path decides which plugins are loaded: `base` and `stock` see nothing of this package but random weights. It
    decides the tiles, too: `ours-tuned` has the tuned ones that are shipped, as a user's server has; `ours` finds an
    empty folder and takes the built-in ones.

    Args:
        point: The step.
        work: A folder for generated files.
    """
    names = [WEIGHTS] if point.path in ("base", "stock") and point.via == "engine" else [WEIGHTS, "lorahost"]
    os.environ["VLLM_PLUGINS"] = ",".join(names)
    os.environ["LORAHOST_KERNELS"] = "on" if point.uses_kernels else "off"
    os.environ.update(point.variables)
    os.environ[WEIGHTS_VARIABLE] = point.weights
    if point.path != "ours-tuned":
        empty = work / "no-configs"
        empty.mkdir(parents=True, exist_ok=True)
        os.environ["LORAHOST_CONFIG_DIR"] = str(empty)
    elif point.config_dir:
        os.environ["LORAHOST_CONFIG_DIR"] = point.config_dir
    else:
        os.environ.pop("LORAHOST_CONFIG_DIR", None)
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        # greedy answers need none, and it is not in every installation
        *([] if importlib.util.find_spec("flashinfer") else [("VLLM_USE_FLASHINFER_SAMPLER", "0")]),
    ):
        os.environ.setdefault(name, value)
    _register_plugins(names, work / "plugins")


def _register_plugins(names: list[str], folder: Path) -> None:
    """Entry points of plugins that no installed package declares, for this process and those that it starts.

    The folder's content does not depend on the path, since engines that run at the same time share it; VLLM_PLUGINS
    says which of them are loaded.
    """
    known = {p.name for p in metadata.entry_points(group=GROUP) if p.value == PLUGINS.get(p.name)}
    info = folder / "lorahost_bench_plugins-0.dist-info"
    write_whole(info / "METADATA", "Metadata-Version: 2.1\nName: lorahost-bench-plugins\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in PLUGINS.items() if name not in known]
    write_whole(info / "entry_points.txt", "\n".join([f"[{GROUP}]", *lines, ""]))
    code = [str(Path(__file__).resolve().parents[2])]
    kernels = importlib.util.find_spec("lorahost_kernels")
    if kernels is not None and kernels.origin:
        code.append(str(Path(kernels.origin).resolve().parents[1]))
    elif "lorahost" in names:
        raise ModuleNotFoundError("lorahost_kernels is not importable: put the folder kernels/ on PYTHONPATH")
    for entry in (*code, str(folder)):
        if entry not in sys.path:
            sys.path.append(entry)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    extra = [entry for entry in (*code, str(folder)) if entry not in given]
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, given), *extra])
