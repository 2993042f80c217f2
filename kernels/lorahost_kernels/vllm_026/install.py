"""Checks vLLM and applies the patches that its platform needs."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from lorahost_kernels import __version__
from lorahost_kernels.operations import OPERATIONS, PRODUCTS
from lorahost_kernels.vllm_026.patching import PluginError
from lorahost_kernels.vllm_026.signatures import VLLM_VERSION, check_signatures

if TYPE_CHECKING:
    from lorahost_kernels.self_check import Paths

log = logging.getLogger("vllm.lorahost")
SKIP_UNTOUCHED = "LORAHOST_SKIP_UNTOUCHED"
BUSY_FIRST = "LORAHOST_BUSY_FIRST"

# Which code runs each operation in this process, filled in by `install`, then by `choose_paths`.
operations: dict[str, str] = {}
# The same for LoRA products with the reason, JSON types: {"path", "reason", "fallback"}, and what the self-check found.
kernels: dict[str, dict[str, Any]] = {}
_installed = False


def install() -> None:
    """Applies all patches once.

    Raises:
        PluginError: wrong vLLM version, or a name that we use has changed, or LORAHOST_KERNELS,
            LORAHOST_SKIP_UNTOUCHED or LORAHOST_BUSY_FIRST is neither on nor off. Nothing is patched then.
    """
    global _installed
    if _installed:
        return
    if vllm.__version__.partition("+")[0] != VLLM_VERSION:
        raise PluginError(
            f"lorahost's vLLM plugin works with vLLM {VLLM_VERSION}, but vLLM {vllm.__version__} is installed; "
            f"install vllm=={VLLM_VERSION}, or leave the plugin out with VLLM_PLUGINS="
        )
    check_signatures(cpu=current_platform.is_cpu())
    wanted = on_or_off("LORAHOST_KERNELS", "on")
    on_or_off(SKIP_UNTOUCHED, "on")  # a wrong value stops the start, not the warm-up after the weights are loaded
    on_or_off(BUSY_FIRST, "on")
    register_common()
    if current_platform.is_cpu():
        register_cpu()
    else:
        register_gpu(wanted)
    _installed = True
    log_operations()


def log_operations() -> None:
    """One line with each operation's path."""
    log.info("lorahost plugin active: %s", ", ".join(f"{name}={path}" for name, path in operations.items()))


def is_installed() -> bool:
    """Whether `install` has completed in this process."""
    return _installed


def register_common() -> None:
    """Patches for every platform: loading in the background, leaving nothing of a failed load, router LoRA."""
    from lorahost_kernels.vllm_026 import loading, router

    loading.apply_patches()
    router.apply_patches()
    operations["adapter_load"] = "background"


def register_cpu() -> None:
    """MoE LoRA on the CPU, and dense LoRA that leaves base rows alone."""
    from lorahost_kernels.vllm_026 import cpu_moe, cpu_punica

    cpu_punica.apply_patches()
    cpu_moe.apply_patches()
    for name in PRODUCTS:
        record(name, "torch", "the engine runs on the CPU")


def on_or_off(name: str, default: str) -> bool:
    """Whether the environment's variable is on. Raises PluginError for a value that is neither on nor off."""
    value = os.environ.get(name, default)
    if value not in ("on", "off"):
        raise PluginError(f"{name}={value!r} must be on or off")
    return value == "on"


def register_gpu(wanted: bool) -> None:
    """This package's kernels if wanted, until `choose_paths` has checked them; else vLLM's own, for all operations."""
    from lorahost_kernels.vllm_026 import router_logits, tp_slices

    if wanted and current_platform.is_cuda():
        from lorahost_kernels.vllm_026 import gpu_punica, prefill_graphs

        gpu_punica.apply_patches()
        prefill_graphs.apply_patches()
        busy_first()
        path, reason = "triton", "LORAHOST_KERNELS=on, not checked yet"
    elif wanted:
        path, reason = "stock", "these kernels are for NVIDIA GPUs"
    else:
        path, reason = "stock", "LORAHOST_KERNELS=off"
    # these repair vLLM, with whichever kernels
    tp_slices.apply_patches()
    router_logits.apply_patches()
    for name in OPERATIONS:
        record(name, path, reason)


def busy_first() -> None:
    """Unless LORAHOST_BUSY_FIRST=off, numbers the busy programs of the OAI Triton experts' GEMM first."""
    from vllm.utils.import_utils import has_triton_kernels

    from lorahost_kernels.vllm_026 import expert_tiles

    if not has_triton_kernels():
        return
    if not on_or_off(BUSY_FIRST, "on"):
        record("expert_tiles", "stock", f"{BUSY_FIRST}=off")
    elif problem := expert_tiles.apply_patches():
        log.warning("lorahost: the experts' base GEMM is launched as vLLM does, which is slower: %s", problem)
        record("expert_tiles", "stock", problem, fallback=True)
    else:
        record("expert_tiles", "busy-first", f"{BUSY_FIRST}=on")


def choose_paths(device: Any, dtype: Any) -> Paths:
    """Runs the self-check, once a process, and records which code runs each operation from here on.

    Call it where vLLM's configuration is set, before the model is compiled: the choice and this package's version
    become a part of the key of vLLM's compile cache, since compiled graphs call other operations with other kernels.

    Args:
        device: Where the LoRA weights are.
        dtype: Of the LoRA weights.

    Raises:
        UnusableDeviceError: a kernel has left the device unusable.
    """
    import torch

    from lorahost_kernels import self_check

    paths = self_check.paths_for(torch.device(device), dtype)
    for name, outcome in paths.outcomes.items():
        record(name, fallback=outcome.path == "stock", **outcome.facts())
    config = get_current_vllm_config_or_none()
    extra = None if config is None else config.additional_config
    if isinstance(extra, dict):
        extra["lorahost_kernels"] = {"version": __version__, "moe": paths.moe, "dense": paths.dense}
    else:
        log.warning("additional_config is no dict: vLLM's compile cache does not know which LoRA kernels are in use")
    log_operations()
    return paths


def skip_untouched(untried: str = "") -> None:
    """Unless LORAHOST_SKIP_UNTOUCHED=off, leaves out launches of modules that no resident adapter touches.

    Call it before CUDA graphs are captured. Where the driver can't, the reason is recorded and everything is launched.
    So it is if that turns out at a capture or replay, unless the graph has launches of which only some may run.

    Args:
        untried: What the engine has with which nobody has tried it; it then needs LORAHOST_SKIP_UNTOUCHED=on.

    Raises:
        PluginError: LORAHOST_SKIP_UNTOUCHED is neither on nor off.
    """
    from lorahost_kernels.vllm_026 import graph_nodes

    wanted = on_or_off(SKIP_UNTOUCHED, "off" if untried else "on")
    if "triton" not in operations.values():
        return
    if graph_nodes.state.driver is not None:
        record("untouched_modules", "skipped", "an earlier engine of this process began it")
    elif not wanted:
        unasked = untried and SKIP_UNTOUCHED not in os.environ
        why = f"not tried with {untried}, {SKIP_UNTOUCHED}=on leaves them out" if unasked else f"{SKIP_UNTOUCHED}=off"
        record("untouched_modules", "launched", why)
    elif problem := graph_nodes.start(launch_untouched):
        launch_untouched(problem)
        return
    else:
        record("untouched_modules", "skipped", f"{SKIP_UNTOUCHED}=on")
    log_operations()


def launch_untouched(problem: str) -> None:
    """Says and records why nothing is left out."""
    log.warning("lorahost: modules that no adapter touches are launched, though for nothing: %s", problem)
    record("untouched_modules", "launched", problem, fallback=True)
    log_operations()


def record(name: str, path: str, reason: str, fallback: bool = False, **more: Any) -> None:
    """Sets the path of a LoRA operation."""
    operations[name] = path
    kernels[name] = {"path": path, "reason": reason, "fallback": fallback, **more}
