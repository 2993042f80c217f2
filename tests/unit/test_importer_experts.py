"""Other layouts of expert LoRA than PEFT's current one: per expert, and with input and output swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
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

HF_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


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
