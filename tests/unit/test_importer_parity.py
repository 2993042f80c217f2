"""The normalised adapter changes every weight exactly as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, PeftModel
from tests.unit.importer_support import (
    ATTENTION,
    EXPERT_PARAMETERS,
    EXPERTS,
    LIMITS,
    assert_same,
    canonical_deltas,
    ids_of,
    import_saved,
    make_config,
    make_layout,
    make_model,
    peft_deltas,
    random_pair,
    with_lora,
    write_adapter,
)

from lorahost.adapters.importer import import_adapter
from lorahost.errors import AdapterRejectedError

DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
DEEPSEEK = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
HF_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
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


def per_expert_tensors(
    block: str, names: dict[str, str], experts: range, shared: bool = False
) -> dict[str, np.ndarray]:
    """Factors as transformers 4 checkpoints have them, for layer 1; `shared` gives gate and up one A."""
    tensors: dict[str, np.ndarray] = {}
    for e in experts:
        for role, name in names.items():
            n_in, n_out = (24, 64) if role == "down" else (64, 24)
            tensors |= random_pair(f"model.layers.1.{block}.experts.{e}.{name}", n_in, n_out)
        if shared:
            prefix = f"model.layers.1.{block}.experts.{e}"
            tensors[f"{prefix}.{names['up']}.A"] = tensors[f"{prefix}.{names['gate']}.A"]
    return tensors


@pytest.mark.parametrize(
    ("name", "block", "names"),
    [("Qwen3Moe", "mlp", HF_NAMES), ("Olmoe", "mlp", HF_NAMES), ("Mixtral", "block_sparse_moe", W_NAMES)],
)
def test_per_expert_checkpoints_as_peft_converts_them(
    name: str, block: str, names: dict[str, str], tmp_path: Path
) -> None:
    config = make_config(name, **({"mlp_only_layers": []} if name == "Qwen3Moe" else {}))
    layout = make_layout(config)
    # PEFT converts whole models only, so both layers need tensors.
    tensors = per_expert_tensors(block, names, range(EXPERTS))
    tensors |= {k.replace("layers.1", "layers.0"): v * 0.5 for k, v in tensors.items()}
    source = write_adapter(tmp_path / "source", tensors, target_modules=list(names.values()))
    expected = peft_deltas(PeftModel.from_pretrained(make_model(config), source), layout)
    report = import_adapter(source, tmp_path / "target", layout, LIMITS)
    assert report.source_format == "experts-per-expert"
    assert report.rank == 4
    assert_same(canonical_deltas(tmp_path / "target", layout), expected)
    assert report.modules == ids_of(expected)


def expected_per_expert(tensors: dict[str, np.ndarray], layout: Any, scale: float = 2.0) -> Any:
    """B·A of `per_expert_tensors`, at alpha/r = 8/4."""
    roles = {name: role for names in (HF_NAMES, W_NAMES) for role, name in names.items()}
    result = {}
    for key in tensors:
        if key.endswith(".A"):
            experts, e, name = key[:-2].rsplit(".", 2)
            experts = next(t.engine for a, t in layout.experts.items() if a == experts)
            result[f"{experts}.{roles[name]}", int(e)] = scale * tensors[f"{key[:-1]}B"] @ tensors[key]
    return result


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss"])
@pytest.mark.parametrize("missing", ["experts", "gate", "up", "down"])
def test_missing_experts_and_projections_become_zeros(name: str, missing: str, tmp_path: Path) -> None:
    layout = make_layout(make_config(name))
    names = {role: n for role, n in HF_NAMES.items() if role != missing}
    tensors = per_expert_tensors("mlp", names, range(1, 3) if missing == "experts" else range(EXPERTS))
    source = write_adapter(tmp_path / "source", tensors)
    report = import_adapter(source, tmp_path / "target", layout, LIMITS)
    got = canonical_deltas(tmp_path / "target", layout)
    assert_same(got, expected_per_expert(tensors, layout))
    assert len(got) == 3 * EXPERTS
    assert len(report.modules) == (1 if missing == "down" else 2)


@pytest.mark.parametrize(("shared", "rank"), [(False, 8), (True, 4)])
def test_per_expert_to_stacked_keeps_gate_and_up_apart(shared: bool, rank: int, tmp_path: Path) -> None:
    layout = make_layout(make_config("GptOss"))
    tensors = per_expert_tensors("mlp", HF_NAMES, range(EXPERTS), shared=shared)
    source = write_adapter(tmp_path / "source", tensors)
    report = import_adapter(source, tmp_path / "target", layout, LIMITS)
    assert report.rank == rank
    assert_same(canonical_deltas(tmp_path / "target", layout), expected_per_expert(tensors, layout))
    if not shared:
        with pytest.raises(AdapterRejectedError) as e:
            import_adapter(source, tmp_path / "small", layout, LIMITS.model_copy(update={"max_rank": 7}))
        assert e.value.code == "rank_too_large"
        assert e.value.details["rank"] == 8


def test_ranks_that_differ_between_experts(tmp_path: Path) -> None:
    layout = make_layout(make_config("Qwen3Moe"))
    tensors = per_expert_tensors("mlp", HF_NAMES, range(EXPERTS))
    tensors |= random_pair("model.layers.1.mlp.experts.2.up_proj", 64, 24, r=7)
    source = write_adapter(
        tmp_path / "source", tensors, rank_pattern={r"experts\.2\.up_proj": 7}, alpha_pattern={"2.up_proj": 14}
    )
    report = import_adapter(source, tmp_path / "target", layout, LIMITS)
    assert report.rank == 7
    assert_same(canonical_deltas(tmp_path / "target", layout), expected_per_expert(tensors, layout))


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "Mixtral"])
def test_swapped_by_another_peft_release(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    layout = make_layout(config)
    model = make_model(config)
    # PEFT's reading of this flag is what differed between releases.
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            module.is_transposed = not module.is_transposed
    lora = with_lora(model, target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
    report, target = import_saved(lora, layout, tmp_path)
    assert report.source_format == "dense+experts-stacked-swapped"
    expected = peft_deltas(lora, layout)
    assert_same(canonical_deltas(target, layout), expected)
    assert report.modules == ids_of(expected)


@pytest.mark.parametrize(
    ("name", "version", "swapped"),
    [
        ("Mixtral", "0.18.1", True),
        ("Mixtral", "0.19.0", True),
        ("Mixtral", "0.19.1", False),
        ("Mixtral", "0.21.2", False),
        ("GptOss", "0.18.0", False),
        ("GptOss", "0.20.0", False),
        ("GptOss", "0.19.0", None),
        ("Mixtral", None, None),
        ("Mixtral", "0.19.1.dev0@abc", None),
    ],
)
def test_square_down_projection_is_read_by_version(
    name: str, version: str | None, swapped: bool | None, tmp_path: Path
) -> None:
    config = make_config(name, intermediate_size=64)
    layout = make_layout(config)
    model = make_model(config)
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            module.is_transposed ^= bool(swapped)
    lora = with_lora(model, target_modules=[], target_parameters=["experts.down_proj"])
    lora.peft_config["default"].peft_version = version or ""
    if swapped is None:
        with pytest.raises(AdapterRejectedError, match="peft_version") as e:
            import_saved(lora, layout, tmp_path)
        assert e.value.code == "ambiguous_orientation"
        return
    report, target = import_saved(lora, layout, tmp_path)
    assert report.source_format == ("experts-stacked-swapped" if swapped else "experts-stacked")
    assert_same(canonical_deltas(target, layout), peft_deltas(lora, layout))


def test_gate_up_decides_the_orientation_of_a_square_down(tmp_path: Path) -> None:
    config = make_config("GptOss", intermediate_size=64)
    layout = make_layout(config)
    lora = with_lora(make_model(config), target_modules=[], target_parameters=EXPERT_PARAMETERS)
    lora.peft_config["default"].peft_version = "0.19.0"
    report, target = import_saved(lora, layout, tmp_path)
    assert report.source_format == "experts-stacked"
    assert_same(canonical_deltas(target, layout), peft_deltas(lora, layout))


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
