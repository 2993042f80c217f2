"""Checks vLLM and applies the patches that its platform needs."""

from __future__ import annotations

import logging
import os

import vllm
from vllm.platforms import current_platform

from lorahost_kernels.vllm_026.patching import PluginError
from lorahost_kernels.vllm_026.signatures import VLLM_VERSION, check_signatures

log = logging.getLogger("vllm.lorahost")

# Which code runs each operation in this process, filled in by `install`.
operations: dict[str, str] = {}
_installed = False


def install() -> None:
    """Applies all patches once.

    Raises:
        PluginError: wrong vLLM version, or a name that we use has changed. Nothing is patched then.
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
    register_common()
    if current_platform.is_cpu():
        register_cpu()
    else:
        register_gpu()
    _installed = True
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
    for operation in ("gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand", "shrink", "expand"):
        operations[operation] = "torch"


def register_gpu() -> None:
    """With LORAHOST_KERNELS=on this package's kernels, else vLLM's own, for every operation."""
    path = "stock"
    if os.environ.get("LORAHOST_KERNELS", "off") == "on":
        from lorahost_kernels.vllm_026 import gpu_punica

        gpu_punica.apply_patches()
        path = "triton"
    for operation in ("gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand", "shrink", "expand"):
        operations[operation] = path
