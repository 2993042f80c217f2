"""The layouts agree with transformers' modules and with what vLLM's LoRA manager wraps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.importer_support import SPECIFIC, make_config, make_layout, make_model

from lorahost.adapters.architectures import SUPPORTED
from lorahost.adapters.layout import ModelLayout
from lorahost.errors import AdapterRejectedError

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SPECIFIC),
    ("Qwen2Moe", {"mlp_only_layers": [1]}),
    ("Qwen3Moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("DeepseekV2", {"q_lora_rank": 20, "n_shared_experts": 3}),
    ("Mixtral", {"head_dim": 8}),
    ("GptOss", {"head_dim": 8}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_layout_covers_the_transformers_model(name: str, changes: dict[str, Any]) -> None:
    config = make_config(name, **changes)
    layout = make_layout(config)
    remaining = set(layout.dense) | set(layout.experts) | set(layout.unservable)
    for path, module in make_model(config).named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            experts = layout.experts[path]
            shape = (experts.num_experts, 2 * experts.intermediate, experts.hidden)
            got = tuple(module.gate_up_proj.shape)
            assert got == ((shape[0], shape[2], shape[1]) if experts.transposed else shape)
            remaining -= set(experts.aliases)
        elif weight is not None and weight.ndim == 2 and path not in layout.unservable:
            target = layout.dense[path]
            assert (target.out_features, target.in_features) == tuple(weight.shape), path
            remaining -= set(target.aliases)
        elif path in layout.unservable:
            assert weight is not None
            remaining.discard(path)
    assert not remaining, "in the layout, but not in the model"


@pytest.mark.engine
@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_layout_names_what_vllm_wraps(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(name, **changes)
    config.save_pretrained(tmp_path)
    layout = ModelLayout.from_config(json.loads((tmp_path / "config.json").read_text()))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    # MLA doesn't exist on the CPU; without it the attention's linear layers have the same names and shapes.
    env["VLLM_MLA_DISABLE"] = "1"
    script = Path(__file__).with_name("vllm_lora_modules.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])

    refused = {m for m in found["ids"] if m in layout.unservable}
    unsplit = {m for m in found["ids"] if m.endswith(".gate_up_proj")}
    assert set(found["ids"]) - refused - unsplit == layout.module_ids
    # Where vLLM can't split the fused layer for LoRA, the layout refuses the parts.
    assert all(m.replace("gate_up_proj", "up_proj") in layout.unservable for m in unsplit)
    for dense in layout.dense_targets():
        assert found["shapes"][dense.engine] == [dense.in_features, dense.out_features]
        # vLLM fuses DeepSeek's q_a and kv_a with MLA only.
        if dense.fused_into is None or not dense.fused_into.endswith("fused_qkv_a_proj"):
            assert found["fused"].get(dense.engine) == dense.fused_into
    for experts in layout.expert_targets():
        expected = [experts.num_experts, experts.hidden, 2 * experts.intermediate, experts.intermediate]
        assert found["shapes"][experts.engine] == expected
        per_expert = {m for m, whole in found["fused"].items() if whole == experts.engine}
        names = {f"{experts.engine}.{e}.{n}" for e in range(experts.num_experts) for n in experts.names.values()}
        assert per_expert == (names if experts.form == "per_expert" else set())
        block = experts.engine.removesuffix("experts")
        assert found["internal_router"][experts.engine] == (f"{block}gate" in layout.unservable)


def test_router_behind_the_runner_is_allowed_on_request() -> None:
    config = make_config("Qwen3Moe")
    assert "model.layers.1.mlp.gate" in make_layout(config).unservable
    layout = make_layout(config, internal_router_lora=True)
    assert "model.layers.1.mlp.gate" in layout.module_ids
    assert ModelLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(AdapterRejectedError, match=r"PhiMoEForCausalLM.*supported: .*GptOssForCausalLM") as e:
        ModelLayout.from_config({"architectures": ["PhiMoEForCausalLM"]})
    assert e.value.code == "unsupported_architecture"
    assert e.value.details["supported"] == sorted(SUPPORTED)
    with pytest.raises(AdapterRejectedError, match="architecture None"):
        ModelLayout.from_config({})


def test_the_page_lists_what_is_supported() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()
    section = page.partition("## Supported base models")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(SUPPORTED)
    assert "`LORAHOST_LORA=false`" in section


@pytest.mark.parametrize("architecture", ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"])
def test_an_architecture_whose_adapters_would_answer_wrongly_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(AdapterRejectedError, match=rf"{architecture}.*scales the experts' input.*would be wrong") as e:
        ModelLayout.from_config({"architectures": [architecture]})
    assert e.value.code == "unsupported_architecture"


@pytest.mark.parametrize(("value", "message"), [(None, "lacks intermediate_size"), ("8", "'8'"), (0, "is 0")])
def test_config_without_a_size(value: object, message: str) -> None:
    config = json.loads(make_config("Mixtral").to_json_string(use_diff=False)) | {"intermediate_size": value}
    with pytest.raises(AdapterRejectedError, match=message) as e:
        ModelLayout.from_config(config)
    assert e.value.code == "invalid_base_config"


def test_published_configs() -> None:
    gpt_oss = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    layout = ModelLayout.from_config(gpt_oss)
    assert layout.dense["model.layers.23.self_attn.k_proj"].engine == "model.layers.23.attn.k_proj"
    assert layout.dense["model.layers.0.self_attn.k_proj"].out_features == 512
    assert len(layout.module_ids) == 24 * (4 + 1 + 2)
    values = sum(
        t.num_experts * (sum(t.features("gate_up")) + sum(t.features("down"))) for t in layout.expert_targets()
    )
    assert values * 32 * 2 == pytest.approx(0.71e9, rel=0.01)


def test_summary_is_short() -> None:
    assert make_layout(make_config("Mixtral")).summary() == (
        "block_sparse_moe.gate, self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, self_attn.v_proj, "
        "block_sparse_moe.experts.*"
    )
