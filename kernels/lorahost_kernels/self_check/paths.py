"""Runs the checks once in a process and decides which code runs each family of operations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lorahost_kernels.operations import DENSE, MOE, OPERATIONS, Path
from lorahost_kernels.self_check.checks import CHECKS, EXACT

log = logging.getLogger("vllm.lorahost")

# Relative error against float64; the rounding of the output alone is 1.7e-3 in bf16 and 2e-4 in fp16.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


class UnusableDeviceError(RuntimeError):
    """A kernel failed in a way that this process's device doesn't recover from."""


@dataclass(frozen=True)
class Outcome:
    """What one check found. error: against float64, NaN where there is none; seconds: with compilation."""

    path: Path
    reason: str
    error: float
    seconds: float
    passed: bool = True

    def facts(self) -> dict[str, Any]:
        """JSON types."""
        error = self.error if math.isfinite(self.error) else None
        return {"path": self.path, "reason": self.reason, "error": error, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class Paths:
    """Who computes the LoRA work of experts (`moe`) and of dense layers."""

    moe: Path
    dense: Path
    outcomes: Mapping[str, Outcome]

    def facts(self) -> dict[str, dict[str, Any]]:
        """Outcomes by operation, JSON types."""
        return {name: outcome.facts() for name, outcome in self.outcomes.items()}


_found: dict[tuple[str, torch.dtype], Paths] = {}


def paths_for(device: torch.device, dtype: torch.dtype) -> Paths:
    """The paths for LoRA weights of `dtype` on `device`; checked at the first call, remembered afterwards.

    Raises:
        UnusableDeviceError: a kernel has left the device unusable.
        ValueError: a dtype that the kernels were never checked with.
        RuntimeError: a CUDA graph is being captured.
    """
    key = (str(device), dtype)
    if key not in _found:
        _found[key] = run(device, dtype)
    return _found[key]


def run(device: torch.device, dtype: torch.dtype) -> Paths:
    """Checks all operations; a family with one that fails goes to vLLM's own kernels as a whole. See `paths_for`."""
    if dtype not in LIMITS:
        raise ValueError(f"dtype {dtype} is none of {', '.join(map(str, LIMITS))}")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the self-check can't run while a CUDA graph is captured")
    began = time.monotonic()
    # the caller's default device and dtype are vLLM's while it loads a model
    with torch.device("cpu"), torch.no_grad():
        found = {name: checked(name, device, dtype) for name in OPERATIONS}
    paths: dict[str, Path] = {}
    for title, family in (("moe", MOE), ("dense", DENSE)):
        failed = [name for name in family if not found[name].passed]
        paths[title] = "stock" if failed else "triton"
        for name in family if failed else ():
            found[name] = fallen_back(found[name], failed)
        if failed:
            log.error("%s LoRA runs on vLLM's own kernels: self-check failed in %s", title, ", ".join(failed))
    log.info("lorahost self-check of %d operations in %.1f s", len(found), time.monotonic() - began)
    return Paths(paths["moe"], paths["dense"], found)


def fallen_back(outcome: Outcome, failed: list[str]) -> Outcome:
    """The outcome of an operation whose family falls back."""
    if not outcome.passed:
        return outcome
    return replace(outcome, path="stock", reason=f"falls back with {', '.join(failed)}; {outcome.reason}")


def checked(name: str, device: torch.device, dtype: torch.dtype) -> Outcome:
    """Runs one check; a failure is logged and becomes an outcome."""
    limit = 0.0 if name in EXACT else LIMITS[dtype]
    began = time.monotonic()
    try:
        error = CHECKS[name](device, dtype)
    except Exception as problem:
        still_usable(name, device, problem)
        return failure(name, first_line(problem), math.nan, began, problem)
    # NaN compares with nothing
    if error <= limit:
        reason = f"self-check passed: error {error:.1e}, limit {limit:.0e}"
        return Outcome("triton", reason, error, time.monotonic() - began)
    return failure(name, f"error {error:.1e} is over the limit {limit:.0e}", error, began)


def failure(name: str, what: str, error: float, began: float, problem: Exception | None = None) -> Outcome:
    """Logs a failed check."""
    log.error("lorahost self-check: %s failed: %s", name, what, exc_info=problem)
    return Outcome("stock", f"self-check failed: {what}", error, time.monotonic() - began, passed=False)


def first_line(problem: Exception) -> str:
    """Kind and first line of an exception; CUDA's have many."""
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"


def still_usable(name: str, device: torch.device, problem: Exception) -> None:
    """Raises UnusableDeviceError where the device has nothing but errors left after `problem`."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise UnusableDeviceError(
            f"the self-check of {name} left {device} unusable ({first_line(problem)}); "
            "start with LORAHOST_KERNELS=off to use vLLM's own kernels"
        ) from error
