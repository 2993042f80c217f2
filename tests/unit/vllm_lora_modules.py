"""What vLLM's own LoRA manager makes of a model and an adapter; run as a program, since it sets up process groups.

argv: directory of config.json; optionally an adapter's directory and an .npz file. Prints the wrapped modules as
JSON. With an adapter, loads and activates it as a worker does, and saves B·A of every module from the slot's buffers
as `<module>` or `<experts>.<gate|up|gate_up|down>` (experts first).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from lorahost_kernels.vllm_026.modules import wrapped_modules


def make_manager(model: str) -> tuple[LoRAModelManager, VllmConfig]:
    """The model with unset weights, wrapped for LoRA."""
    config = EngineArgs(
        model=model,
        enable_lora=True,
        max_lora_rank=16,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        net = initialize_model(vllm_config=config).float()
        process_weights_after_loading(net, config.model_config, torch.device("cpu"))
        return LoRAModelManager(net, 4, 64, 64, config.lora_config, torch.device("cpu"), config), config


def describe(manager: LoRAModelManager) -> dict[str, Any]:
    """Names, shapes ([in, out], for experts [E, H, 2I, I]), fused parents, and who calls the router."""
    shapes = {}
    for name, module in manager.modules.items():
        if hasattr(module, "w2_lora_a_stacked"):
            a13, b13, a2 = module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0], module.w2_lora_a_stacked[0]
            shapes[name] = [a13.shape[1], a13.shape[-1], b13.shape[-2] * len(module.w13_lora_b_stacked), a2.shape[-1]]
            continue
        slices = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        for part, (a, b) in zip(manager.packed_modules.get(name, [name]), slices, strict=False):
            shapes[part] = [a.shape[-1], b.shape[-2]]
    runners = {n: m.base_layer for n, m in manager.modules.items() if hasattr(m, "w2_lora_a_stacked")}
    return {
        "ids": wrapped_modules(manager),
        "shapes": shapes,
        "fused": {part: whole for whole, parts in manager.packed_modules.items() for part in parts},
        "internal_router": {name: runner.gate is not None for name, runner in runners.items()},
    }


def deltas(manager: LoRAModelManager, config: VllmConfig, adapter: str) -> Iterator[tuple[str, np.ndarray]]:
    """Activates the adapter in slot 0 and multiplies its buffers."""
    worker = WorkerLoRAManager(config, torch.device("cpu"), {})
    worker._adapter_manager = manager
    manager.add_adapter(worker._load_adapter(LoRARequest("adapter", 1, adapter)))
    manager.activate_adapter(1)
    for name, module in manager.modules.items():
        if hasattr(module, "w2_lora_a_stacked"):
            roles = ("gate_up",) if len(module.w13_lora_a_stacked) == 1 else ("gate", "up")
            for role, a, b in zip(roles, module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True):
                yield f"{name}.{role}", (b[0] @ a[0]).numpy()
            yield f"{name}.down", (module.w2_lora_b_stacked[0][0] @ module.w2_lora_a_stacked[0][0]).numpy()
        elif "layers" in name:
            slices = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, (a, b) in zip(manager.packed_modules.get(name, [name]), slices, strict=True):
                yield part, (b[0, 0] @ a[0, 0]).numpy()


def main(model: str, adapter: str | None = None, out: str | None = None) -> None:
    """See the module's docstring."""
    manager, config = make_manager(model)
    if adapter is not None and out is not None:
        np.savez(out, **dict(deltas(manager, config, adapter)))
    print(json.dumps(describe(manager)))


if __name__ == "__main__":
    main(*sys.argv[1:])
