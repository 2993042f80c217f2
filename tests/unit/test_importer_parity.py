"""The normalised adapter changes every weight exactly as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel
from tests.unit.importer_support import (
    ATTENTION,
    EXPERT_PARAMETERS,
    LIMITS,
    assert_same,
    canonical_deltas,
    ids_of,
    import_saved,
    make_config,
    make_layout,
    make_model,
    peft_deltas,
    with_lora,
)

from lorahost.adapters.importer import import_adapter
from lorahost.errors import AdapterRejectedError

DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
DEEPSEEK = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
HF_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MOE_ARCHITECTURES = ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss"]


def check(name: str, tmp_path: Path, layout_options: dict[str, Any] | None = None, **lora: Any) -> Any:
    """Imports what PEFT saves for a tiny `name` and compares; returns the report."""
    config = make_config(name)
    layout = make_layout(config, **(layout_options or {}))
    peft_model = with_lora(make_model(config), **lora)
    report, target = import_saved(peft_model, layout, tmp_path)
    expected = peft_deltas(peft_model, layout)
    got = canonical_deltas(target, layout)
    assert_same(got, expected)
    assert report.modules == ids_of(expected) == ids_of(got)
    assert report.modules <= layout.module_ids
    return report


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_dense_models(name: str, tmp_path: Path) -> None:
    report = check(name, tmp_path, target_modules=DENSE)
    assert report.source_format == "dense"
    assert report.rank == 4
    assert len(report.modules) == 14


@pytest.mark.parametrize("name", MOE_ARCHITECTURES)
def test_experts_as_parameters(name: str, tmp_path: Path) -> None:
    report = check(name, tmp_path, target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
    assert report.source_format == "dense+experts-stacked"
    assert report.rank == 4
    assert report.scale_notes[0].startswith("alpha/r = 2 on")


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_deepseek_with_shared_experts(name: str, tmp_path: Path) -> None:
    # PEFT takes gate_proj and the like in target_modules for the routed experts; as parameters they are just layers.
    shared = [f"mlp.shared_experts.{n}.weight" for n in HF_NAMES.values()]
    dense = [f"layers.0.mlp.{n}.weight" for n in HF_NAMES.values()]
    parameters = [*EXPERT_PARAMETERS, *shared, *dense]
    report = check(
        name,
        tmp_path,
        target_modules=DEEPSEEK,
        target_parameters=parameters,
        alpha_pattern={"down_proj.weight": 3, "up_proj": 5},
    )
    assert "model.layers.1.mlp.shared_experts.down_proj" in report.modules
    assert "model.layers.0.mlp.gate_proj" in report.modules
    assert ("model.layers.0.self_attn.q_a_proj" in report.modules) == (name == "DeepseekV3")
    assert report.warnings == ["adapter_config.json: no module matches alpha_pattern['up_proj']"]


def test_qwen2_moe_shared_expert(tmp_path: Path) -> None:
    parameters = [f"shared_expert.{n}.weight" for n in HF_NAMES.values()]
    report = check("Qwen2Moe", tmp_path, target_modules=[], target_parameters=parameters)
    assert "model.layers.1.mlp.shared_expert.up_proj" in report.modules


@pytest.mark.parametrize("name", MOE_ARCHITECTURES)
@pytest.mark.parametrize("parameter", EXPERT_PARAMETERS)
def test_one_expert_parameter_alone(name: str, parameter: str, tmp_path: Path) -> None:
    report = check(name, tmp_path, target_modules=[], target_parameters=[parameter])
    suffix = ".down" if "down" in parameter else ".gate_up"
    assert all(m.endswith(suffix) for m in report.modules)


@pytest.mark.parametrize("name", MOE_ARCHITECTURES)
def test_rslora_and_patterns(name: str, tmp_path: Path) -> None:
    report = check(
        name,
        tmp_path,
        target_modules=ATTENTION,
        target_parameters=EXPERT_PARAMETERS,
        use_rslora=True,
        rank_pattern={"k_proj": 2, r"layers\.1\.mlp\.experts\.gate_up_proj": 6, "experts.down_proj": 3},
        alpha_pattern={r"layers\.\d+\.self_attn\.v_proj": 5, "down_proj": 1, "1.self_attn.q_proj": 32},
    )
    assert report.rank == 6
    assert report.warnings == []
    assert all(note.startswith("alpha/sqrt(r) = ") for note in report.scale_notes)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_all_linear_doubles_the_rank_of_gate_up(name: str, tmp_path: Path) -> None:
    report = check(name, tmp_path, {"internal_router_lora": True}, target_modules="all-linear")
    assert report.rank == 8
    router = "model.layers.1.block_sparse_moe.gate" if name == "Mixtral" else "model.layers.1.mlp.gate"
    assert router in report.modules


def test_router_of_qwen3_moe_is_refused_on_stock_vllm(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match=r"mlp\.gate: vLLM 0\.26\.0's expert runner") as e:
        check("Qwen3Moe", tmp_path, target_modules="all-linear")
    assert e.value.code == "unservable_module"


def test_router_of_gpt_oss(tmp_path: Path) -> None:
    report = check("GptOss", tmp_path, target_modules=["q_proj"], target_parameters=["router.weight"])
    assert "model.layers.0.mlp.router" in report.modules


def test_normalised_adapter_imports_to_itself(tmp_path: Path) -> None:
    for name in ("GptOss", "Mixtral"):
        config = make_config(name)
        layout = make_layout(config)
        lora = with_lora(make_model(config), target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
        first, target = import_saved(lora, layout, tmp_path / name)
        again = import_adapter(target, tmp_path / name / "again", layout, LIMITS)
        assert again.modules == first.modules
        assert_same(canonical_deltas(tmp_path / name / "again", layout), canonical_deltas(target, layout))


def test_peft_reads_our_gpt_oss_form(tmp_path: Path) -> None:
    config = make_config("GptOss")
    layout = make_layout(config)
    lora = with_lora(make_model(config), target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
    report, target = import_saved(lora, layout, tmp_path)
    again = LoraConfig(
        r=report.rank, lora_alpha=report.rank, target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS
    )
    loaded = PeftModel.from_pretrained(make_model(config), target, config=again)
    assert_same(peft_deltas(loaded, layout), peft_deltas(lora, layout))
