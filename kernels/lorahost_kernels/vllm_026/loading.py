"""Reading adapters in the background, so that activating one costs running requests only the copy into its slot.

Stock vLLM reads, scales and packs an adapter inside the engine's loop. Here a thread of the worker does all that
beforehand, and vLLM's `_load_adapter` takes the finished host copy.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm.lora.lora_model
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from lorahost_kernels.vllm_026.patching import original, patch

log = logging.getLogger("vllm.lorahost")

# While an adapter is read, the engine's thread gets Python's lock back after this many seconds instead of 5 ms.
SWITCH_INTERVAL_S = 0.0002
_switch_lock = threading.Lock()
_switch_users = 0
_switch_before = 0.0


@dataclass
class _Preparation:
    request: Any
    started: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    lora: Any = None
    error: Exception | None = None

    @property
    def state(self) -> str:
        if not self.done.is_set():
            return "reading"
        return "ready" if self.error is None else "failed"


class AdapterPreparer:
    """The adapters that one worker is reading or has ready but not loaded yet.

    Args:
        manager: vLLM's WorkerLoRAManager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._preparations: dict[int, _Preparation] = {}
        self._lock = threading.Lock()
        # Readers queue up here: one at a time bounds the memory and the time taken from the engine's thread.
        self._one_reader = threading.Lock()

    def start(self, path: str, name: str, engine_id: int) -> None:
        """Starts reading `path`, an adapter directory, and returns at once.

        Raises:
            ValueError: the id is loaded, or being prepared, already.
        """
        preparation = _Preparation(LoRARequest(lora_name=name, lora_int_id=engine_id, lora_path=path))
        with self._lock:
            if engine_id in self._preparations or engine_id in self._manager.list_adapters():
                raise ValueError(f"engine_id {engine_id} ({name}) is loaded or being prepared already")
            self._preparations[engine_id] = preparation
        threading.Thread(target=self._read, args=(preparation,), name=f"adapter-{engine_id}", daemon=True).start()

    def _read(self, preparation: _Preparation) -> None:
        try:
            with self._one_reader, _fast_thread_switching():
                lora = _stock_load(self._manager, preparation.request)
                self._manager._adapter_manager._create_merged_loras_inplace(lora)
                preparation.lora = lora
        except Exception as error:
            log.warning("adapter %s can't be loaded: %s", preparation.request.lora_name, error)
            preparation.error = error
        finally:
            preparation.seconds = time.monotonic() - preparation.started
            preparation.done.set()

    def poll(self, engine_id: int) -> dict[str, Any]:
        """`{"state": "reading" | "ready" | "failed", "seconds", "error"?}`.

        Raises:
            KeyError: the id is not being prepared, for instance because it is loaded by now.
        """
        preparation = self._preparations.get(engine_id)
        if preparation is None:
            raise KeyError(f"engine_id {engine_id} is not being prepared")
        state = preparation.state
        if state == "reading":
            return {"state": state, "seconds": time.monotonic() - preparation.started}
        answer: dict[str, Any] = {"state": state, "seconds": preparation.seconds}
        if preparation.error is not None:
            answer["error"] = f"{type(preparation.error).__name__}: {preparation.error}"
        return answer

    def take(self, request: Any) -> Any | None:
        """The prepared LoRAModel of this request, waiting for its reader; None when it was never prepared.

        Raises:
            Exception: whatever made reading fail.
            ValueError: it was prepared under another name or path.
        """
        with self._lock:
            preparation = self._preparations.pop(request.lora_int_id, None)
        if preparation is None:
            return None
        prepared = preparation.request
        if (prepared.lora_name, prepared.lora_path) != (request.lora_name, request.lora_path):
            raise ValueError(
                f"engine_id {request.lora_int_id} was prepared as {prepared.lora_name} from {prepared.lora_path}, "
                f"but is loaded as {request.lora_name} from {request.lora_path}"
            )
        preparation.done.wait()
        if preparation.error is not None:
            raise preparation.error
        return preparation.lora

    def discard(self, engine_id: int) -> bool:
        """Forgets a preparation, finished or not; False when there is none."""
        with self._lock:
            return self._preparations.pop(engine_id, None) is not None

    def prepared(self) -> list[int]:
        """Engine ids that are being read or ready, sorted."""
        return sorted(self._preparations)


def preparer_of(manager: Any) -> AdapterPreparer:
    """The preparer that belongs to a WorkerLoRAManager."""
    preparer: AdapterPreparer | None = manager.__dict__.get("lorahost_preparer")
    if preparer is None:
        preparer = manager.lorahost_preparer = AdapterPreparer(manager)
    return preparer


@contextlib.contextmanager
def _fast_thread_switching() -> Iterator[None]:
    global _switch_users, _switch_before
    with _switch_lock:
        if _switch_users == 0:
            _switch_before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        _switch_users += 1
    try:
        yield
    finally:
        with _switch_lock:
            _switch_users -= 1
            if _switch_users == 0:
                sys.setswitchinterval(_switch_before)


def _pin(lora: Any) -> None:
    """Page-locks the host copies when there is a GPU; stock leaves them pageable when a packed module comes first."""
    if not torch.cuda.is_available():
        return
    for weights in lora.loras.values():
        for factor in ("lora_a", "lora_b"):
            value = getattr(weights, factor)
            if isinstance(value, list):
                value[:] = [None if tensor is None else tensor.pin_memory() for tensor in value]
            else:
                setattr(weights, factor, value.pin_memory())


def _stock_load(manager: Any, request: Any) -> Any:
    return original(WorkerLoRAManager, "_load_adapter")(manager, request)


def _load_adapter(self: Any, lora_request: Any) -> Any:
    """`WorkerLoRAManager._load_adapter`: the prepared host copy if there is one, else read now as stock does."""
    lora = preparer_of(self).take(lora_request)
    return lora if lora is not None else _stock_load(self, lora_request)


def _create_merged_loras_inplace(self: Any, lora_model: Any) -> None:
    """`LoRAModelManager._create_merged_loras_inplace`, once per adapter."""
    if lora_model.__dict__.get("lorahost_packed"):
        return
    original(LoRAModelManager, "_create_merged_loras_inplace")(self, lora_model)
    _pin(lora_model)
    lora_model.lorahost_packed = True


def _stack_moe_lora_weights(self: Any, lora_model: Any, module: Any, module_name: str) -> None:
    """`LoRAModelManager._stack_moe_lora_weights`, then drops gate_up's second entry, which would be kept twice."""
    original(LoRAModelManager, "_stack_moe_lora_weights")(self, lora_model, module, module_name)
    stacked = lora_model.loras.get(module_name)
    if stacked is not None and isinstance(stacked.lora_a, list):
        lora_model.loras.pop(f"{module_name}.base_layer", None)


def _add_adapter(self: Any, lora_request: Any) -> bool:
    """`LRUCacheWorkerLoRAManager.add_adapter` that leaves nothing behind when it fails.

    Stock keeps a failed adapter registered and its slot taken, so that a second try with the same id answers True
    and serves half-loaded weights.
    """
    try:
        added: bool = original(LRUCacheWorkerLoRAManager, "add_adapter")(self, lora_request)
    except Exception:
        self._adapter_manager.remove_adapter(lora_request.lora_int_id)
        raise
    return added


def _remove_adapter(self: Any, adapter_id: int) -> bool:
    """`WorkerLoRAManager.remove_adapter` that also forgets a prepared copy."""
    preparer_of(self).discard(adapter_id)
    removed: bool = original(WorkerLoRAManager, "remove_adapter")(self, adapter_id)
    return removed


def apply_patches() -> None:
    """Patches vLLM's LoRA managers."""
    patch(WorkerLoRAManager, "_load_adapter", _load_adapter)
    patch(WorkerLoRAManager, "remove_adapter", _remove_adapter)
    patch(LRUCacheWorkerLoRAManager, "add_adapter", _add_adapter)
    patch(LoRAModelManager, "_create_merged_loras_inplace", _create_merged_loras_inplace)
    patch(LoRAModelManager, "_stack_moe_lora_weights", _stack_moe_lora_weights)
    # Pinning each of thousands of tensors as it is read only delays: they are pinned again once packed.
    patch(vllm.lora.lora_model, "PIN_MEMORY", False)
