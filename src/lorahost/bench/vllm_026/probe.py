"""Worker extension: what runs in the workers, as they say it themselves."""

from __future__ import annotations

import sys
from typing import Any


class Probe:
    """Mixed into vLLM's worker class, reached through `collective_rpc`."""

    model_runner: Any
    device: Any

    def lorahost_bench_probe(self) -> dict[str, Any]:
        """The GPU's name, the experts' kernels, the LoRA wrapper's class (empty without LoRA), our operations."""
        import torch

        install = sys.modules.get("lorahost_kernels.vllm_026.install")
        wrapper = getattr(
            getattr(_manager(self.model_runner), "_adapter_manager", None), "punica_wrapper_mapping", None
        )
        kinds = sorted({f"{type(w).__module__}.{type(w).__qualname__}" for w in (wrapper or {}).values()})
        return {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "experts": sorted(set(map(_experts, self.model_runner.get_model().modules())) - {""}),
            "wrapper": ",".join(kinds),
            "operations": dict(getattr(install, "operations", {})),
        }


def _manager(runner: Any) -> Any:
    return getattr(runner, "lora_manager", None)


def _experts(module: Any) -> str:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return type(kernel.fused_experts).__name__ if kernel is not None else ""
