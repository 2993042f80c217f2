"""vLLM's own loader puts into an adapter slot exactly the change that PEFT makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.importer_support import (
    ATTENTION,
    EXPERT_PARAMETERS,
    Deltas,
    assert_same,
    import_saved,
    make_config,
    make_layout,
    make_model,
    peft_deltas,
    with_lora,
)

pytestmark = pytest.mark.engine

DEEPSEEK = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
SHARED = [f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")]
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "Qwen3Moe": {"target_modules": ATTENTION, "target_parameters": EXPERT_PARAMETERS, "use_rslora": True},
    "Olmoe": {"target_modules": "all-linear"},
    "Mixtral": {"target_modules": "all-linear"},
    "GptOss": {
        "target_modules": ["k_proj", "o_proj"],
        "target_parameters": [*EXPERT_PARAMETERS, "router.weight"],
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"gate_up_proj": 1},
    },
    "DeepseekV3": {"target_modules": DEEPSEEK, "target_parameters": [*EXPERT_PARAMETERS, *SHARED]},
}


@pytest.mark.parametrize("name", list(CASES))
def test_slot_holds_what_peft_adds(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    layout = make_layout(config)
    lora = with_lora(make_model(config), **CASES[name])
    _, target = import_saved(lora, layout, tmp_path)
    config.save_pretrained(tmp_path / "base")
    # MLA doesn't exist on the CPU.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"}
    script = Path(__file__).with_name("vllm_lora_modules.py")
    command = [sys.executable, str(script), str(tmp_path / "base"), str(target), str(tmp_path / "slot.npz")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert_same(by_expert(dict(np.load(tmp_path / "slot.npz"))), peft_deltas(lora, layout))


def by_expert(slot: dict[str, np.ndarray]) -> Deltas:
    """The slot's products in the form of `peft_deltas`; GPT-OSS interleaves gate and up."""
    result: Deltas = {}
    for name, delta in slot.items():
        if delta.ndim == 2:
            result[name, None] = delta
            continue
        for e, matrix in enumerate(delta):
            if name.endswith(".gate_up"):
                experts = name.removesuffix(".gate_up")
                result[f"{experts}.gate", e], result[f"{experts}.up", e] = matrix[0::2], matrix[1::2]
            else:
                result[name, e] = matrix
    return result
