"""Prints, as JSON, the modules that vLLM's LoRA manager wraps for the model whose config.json is in argv[1].

Run as a program: it sets up vLLM's process groups, which can be done once in a process.
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from lorahost_kernels.vllm_026.modules import wrapped_modules


def main(model: str) -> None:
    """Builds the model with unset weights, wraps it, and describes every wrapped module."""
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
        manager = LoRAModelManager(net, 4, 64, 64, config.lora_config, torch.device("cpu"), config)
    shapes = {}
    for name, module in manager.modules.items():
        if hasattr(module, "w2_lora_a_stacked"):
            a13, b13, a2 = module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0], module.w2_lora_a_stacked[0]
            shapes[name] = [a13.shape[1], a13.shape[-1], b13.shape[-2] * len(module.w13_lora_b_stacked), a2.shape[-1]]
            continue
        slices = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        parts = manager.packed_modules.get(name, [name])
        for part, (a, b) in zip(parts, slices, strict=False):
            shapes[part] = [a.shape[-1], b.shape[-2]]
    runners = {n: m.base_layer for n, m in manager.modules.items() if hasattr(m, "w2_lora_a_stacked")}
    internal = {name: runner.gate is not None for name, runner in runners.items()}
    fused = {part: whole for whole, parts in manager.packed_modules.items() for part in parts}
    print(json.dumps({"ids": wrapped_modules(manager), "shapes": shapes, "fused": fused, "internal_router": internal}))


main(sys.argv[1])
