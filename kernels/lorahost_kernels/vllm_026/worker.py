"""Methods that the server calls in every worker: `worker_extension_cls`, reached through `collective_rpc`."""

from __future__ import annotations

from typing import Any

import vllm

import lorahost_kernels
from lorahost_kernels.tuned import active
from lorahost_kernels.vllm_026 import graph_nodes, install, modules, patching
from lorahost_kernels.vllm_026.loading import AdapterPreparer, preparer_of


class WorkerExtension:
    """Mixed into vLLM's worker class; an exception here reaches the caller and leaves the engine running."""

    device: Any
    model_runner: Any

    def lorahost_report(self) -> dict[str, Any]:
        """What of the plugin is active in this worker, JSON types only.

        `active` is False when vLLM did not call the plugin here; the server must not start then. `kernels` has the
        path of each LoRA operation with its reason, and with the self-check's error where it has run; `tuned` says
        where the operations' tiles come from, `graph_nodes` how many launches of CUDA graphs are left out.
        """
        return {
            "active": install.is_installed(),
            "plugin_version": lorahost_kernels.__version__,
            "vllm_version": vllm.__version__,
            "patches": patching.applied(),
            "device": str(self.device),
            "operations": dict(install.operations),
            "kernels": {name: dict(found) for name, found in install.kernels.items()},
            "tuned": active.report(),
            "graph_nodes": graph_nodes.report(),
        }

    def lorahost_wrapped_modules(self) -> list[str]:
        """Modules that can hold LoRA weights, unfused names, sorted."""
        return modules.wrapped_modules(_lora_manager(self)._adapter_manager)

    def lorahost_adapter_modules(self, engine_id: int) -> list[str]:
        """Modules that hold non-zero LoRA weights of a loaded adapter, unfused names, sorted.

        Raises:
            KeyError: the adapter is not loaded.
            RuntimeError: its slot holds something else than was loaded.
        """
        return modules.adapter_modules(_lora_manager(self)._adapter_manager, engine_id)

    def lorahost_prepare_adapter(self, path: str, name: str, engine_id: int) -> None:
        """Starts reading the adapter directory `path` in the background; `add_lora` then takes the result.

        Raises:
            ValueError: the id is loaded, or being prepared, already.
        """
        _preparer(self).start(path, name, engine_id)

    def lorahost_prepare_poll(self, engine_id: int) -> dict[str, Any]:
        """`{"state": "reading" | "ready" | "failed", "seconds", "error"?}`; KeyError for an unknown id."""
        return _preparer(self).poll(engine_id)

    def lorahost_discard_prepared(self, engine_id: int) -> bool:
        """Frees what was prepared and not loaded; False when there is nothing of that id."""
        return _preparer(self).discard(engine_id)


def _lora_manager(worker: Any) -> Any:
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise RuntimeError("LoRA is not enabled in this engine; start it with enable_lora")
    return manager


def _preparer(worker: Any) -> AdapterPreparer:
    return preparer_of(_lora_manager(worker))
