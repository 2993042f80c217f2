"""Worker extension: what runs in the workers, as they say it themselves."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lorahost.bench import decode_profile
from lorahost.bench.decode_profile import Profile


class Probe:
    """Mixed into vLLM's worker class, reached through `collective_rpc`."""

    model_runner: Any
    device: Any
    lorahost_bench_profiler: Any

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

    def lorahost_bench_profile_start(self) -> None:
        """Starts to note what the GPU does and which calls start it.

        Raises:
            RuntimeError: there is no GPU.
        """
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("a profile needs a GPU")
        # the host's operations would slow it down and make other gaps
        self.lorahost_bench_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.lorahost_bench_profiler.start()

    def lorahost_bench_profile_stop(self) -> Profile:
        """What was noted since the start; the trace itself, of many megabytes, stays here.

        Prints how often CUDA graphs were built anew, for the engine's log.

        Raises:
            ValueError: there is no whole step in it.
        """
        profiler = self.lorahost_bench_profiler
        del self.lorahost_bench_profiler
        profiler.stop()
        if graphs := sys.modules.get("lorahost_kernels.vllm_026.graph_nodes"):
            print(f"graphs: {graphs.report()}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            return decode_profile.summarise(json.loads(trace.read_text()))


def _manager(runner: Any) -> Any:
    return getattr(runner, "lora_manager", None)


def _experts(module: Any) -> str:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return type(kernel.fused_experts).__name__ if kernel is not None else ""
