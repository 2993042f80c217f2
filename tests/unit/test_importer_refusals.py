"""What can't be served is refused with a stable code and both sides of the mismatch; nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.unit.importer_support import (
    ATTENTION,
    EXPERT_PARAMETERS,
    GOOD,
    LIMITS,
    import_saved,
    make_config,
    make_layout,
    make_model,
    random_pair,
    refused,
    with_lora,
    write_adapter,
)
from tests.unit.importer_support import (
    QWEN3_EXPERTS as EXPERTS,
)
from tests.unit.importer_support import (
    QWEN3_Q as Q,
)

from lorahost.adapters.importer import import_adapter

LAYOUT = make_layout(make_config("Qwen3Moe"))


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ({"peft_type": "LOHA"}, "unsupported_peft_type", "'LOHA'; only 'LORA'"),
        ({"peft_type": None}, "unsupported_peft_type", "None"),
        ({"use_dora": True}, "dora_unsupported", "use_dora is True"),
        ({"bias": "lora_only"}, "bias_unsupported", "bias is 'lora_only'; only 'none'"),
        ({"lora_bias": True}, "bias_unsupported", "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save_unsupported", "lm_head"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out_unsupported", "fan_in_fan_out is True"),
        ({"trainable_token_indices": [3]}, "trainable_tokens_unsupported", r"\[3\]"),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_tokens_unsupported", "embed_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication_unsupported", "layer_replication"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_unsupported", r"\[5, 6\]"),
        ({"megatron_config": {"a": 1}}, "megatron_unsupported", "megatron_config"),
        ({"init_lora_weights": "pissa_niter_16"}, "base_changing_init", "pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "base_changing_init", "olora"),
        ({"use_qalora": True}, "unsupported_variant", "use_qalora is True"),
        ({"arrow_config": {"top_k": 2}}, "unsupported_variant", "arrow_config"),
        ({"use_future": True}, "unsupported_variant", "use_future"),
        ({"r": 0}, "invalid_config", "r: .*greater than 0, got 0"),
        ({"r": "x"}, "invalid_config", "'x'"),
        ({"rank_pattern": {"(": 3}}, "invalid_config", r"rank_pattern has '\('"),
        ({"rank_pattern": {"q_proj": 0}}, "invalid_config", "greater than 0"),
    ],
)
def test_config_features(config: dict[str, Any], code: str, message: str, tmp_path: Path) -> None:
    error = refused(write_adapter(tmp_path / "a", GOOD, **config), tmp_path)
    assert error.code == code
    assert error.status == 424
    assert re.search(message, error.message), error.message


def test_harmless_config_fields_pass(tmp_path: Path) -> None:
    config = {
        "megatron_core": "megatron.core",
        "loftq_config": {},
        "runtime_config": {"ephemeral_gpu_offload": False},
        "eva_config": {"rho": 2.0},
        "init_lora_weights": "gaussian",
        "use_bdlora": None,
        "rank_pattern": None,
        "something_new": [1],
        "target_modules": "all-linear",
        "lora_alpha": 8.0,
    }
    report = import_adapter(write_adapter(tmp_path / "a", GOOD, **config), tmp_path / "t", LAYOUT, LIMITS)
    assert report.modules == {Q}


def test_rank_above_the_limit_has_both_numbers(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", random_pair(Q, 64, 64, r=48), r=48)
    error = refused(source, tmp_path, limits=LIMITS.model_copy(update={"max_rank": 32}))
    assert (error.status, error.code) == (400, "rank_too_large")
    assert error.details == {"rank": 48, "max_lora_rank": 32, "module": Q}
    assert "rank 48" in error.message
    assert "max_lora_rank is 32" in error.message


def test_rank_that_the_config_denies(tmp_path: Path) -> None:
    error = refused(write_adapter(tmp_path / "a", GOOD, r=16), tmp_path)
    assert (error.status, error.code) == (400, "rank_mismatch")
    assert (error.details["rank"], error.details["declared_rank"]) == (4, 16)


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        (random_pair("model.layers.9.self_attn.q_proj", 64, 64), "unknown_module", ["layers.9", "self_attn.q_proj"]),
        (random_pair("model.layers.0.self_attn.qkv", 64, 64), "unknown_module", ["1 modules", "mlp.experts.*"]),
        (random_pair(f"{EXPERTS}.1.w9", 64, 24), "unknown_module", ["experts.1.w9"]),
        (random_pair(f"{EXPERTS}.4.up_proj", 64, 24), "wrong_shape", ["expert 4", "4 experts"]),
        (random_pair("model.embed_tokens", 64, 64), "unservable_module", ["embed_tokens"]),
        (random_pair("lm_head", 64, 64), "unservable_module", ["lm_head"]),
        (random_pair(Q, 32, 64), "wrong_shape", [Q, "[4, 32] and [64, 4]", "(r, 64) and (64, r)"]),
        (random_pair(f"{EXPERTS}.1.up_proj", 64, 32), "wrong_shape", ["[32, 4]", "(24, r)"]),
        (random_pair(EXPERTS, 64, 30, r=16), "wrong_shape", ["[16, 64]", "(48, r*4)", "down"]),
        (random_pair(EXPERTS, 64, 48, r=6), "wrong_shape", ["[6, 64]", "r*4"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"]}, "unpaired_tensor", [f"{Q} (only lora_A)"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"], f"{Q}.B": np.zeros((64, 4), np.float32)}, "no_effect", ["zero in all 1"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"] * np.nan, f"{Q}.B": GOOD[f"{Q}.B"]}, "not_finite", [f"{Q}.lora_A.weight"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"], f"{Q}.B": GOOD[f"{Q}.B"] * np.inf}, "not_finite", [f"{Q}.lora_B.weight"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"].astype(np.float64), f"{Q}.B": GOOD[f"{Q}.B"]}, "unsupported_dtype", ["F64", "BF16"]),
        ({f"{Q}.A": GOOD[f"{Q}.A"][0], f"{Q}.B": GOOD[f"{Q}.B"]}, "wrong_shape", ["[64]"]),
        ({}, "no_tensors", ["no tensors"]),
        (random_pair(EXPERTS, 64, 48, r=16) | random_pair(f"{EXPERTS}.0.up_proj", 64, 24), "mixed_layout", ["stacked"]),
        (
            random_pair(EXPERTS, 64, 48, r=16) | random_pair(f"{EXPERTS}.base_layer", 64, 48, r=16),
            "wrong_shape",
            ["one pair for gate_up and one for down"],
        ),
        (
            random_pair(EXPERTS, 24, 64, r=16) | random_pair(f"{EXPERTS}.base_layer", 48, 64, r=16),
            "mixed_layout",
            ["swapped"],
        ),
        (
            random_pair(f"{EXPERTS}.0.up_proj", 64, 24) | random_pair(f"{EXPERTS}.0.w3", 64, 24),
            "duplicate_module",
            ["up_proj", "w3"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tensors(tensors: dict[str, np.ndarray], code: str, words: list[str], tmp_path: Path) -> None:
    error = refused(write_adapter(tmp_path / "a", tensors), tmp_path)
    assert error.code == code
    assert all(word in error.message for word in words), error.message


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "dora_unsupported"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding_unsupported"),
        ("base_model.model.model.embed_tokens.weight", "embedding_unsupported"),
        ("base_model.model.lm_head.weight", "embedding_unsupported"),
        ("base_model.model.lm_head.modules_to_save.weight", "modules_to_save_unsupported"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "bias_unsupported"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens_unsupported"),
        ("base_model.model.model.norm.weight", "unknown_tensor"),
    ],
)
def test_tensors_that_are_no_lora(name: str, code: str, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    named = {f"base_model.model.{Q}.lora_{h}.weight": GOOD[f"{Q}.{h}"] for h in "AB"}
    save_file({**named, name: np.ones((4, 4), np.float32)}, source / "adapter_model.safetensors")
    error = refused(source, tmp_path)
    assert error.code == code
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "module"),
    [("DeepseekV2", "self_attn.kv_b_proj"), ("Qwen2Moe", "mlp.shared_expert_gate"), ("DeepseekV3", "mlp.gate")],
)
def test_modules_that_vllm_would_ignore(name: str, module: str, tmp_path: Path) -> None:
    config = make_config(name)
    target = "gate.weight" if module == "mlp.gate" else module
    lora = with_lora(
        make_model(config),
        target_modules=[] if module == "mlp.gate" else [module],
        target_parameters=[target] if module == "mlp.gate" else None,
    )
    lora.save_pretrained(tmp_path / "a")
    error = refused(tmp_path / "a", tmp_path, make_layout(config))
    assert error.code == "unservable_module"
    assert module in error.message


def test_untrained_adapter_has_no_effect(tmp_path: Path) -> None:
    config = make_config("GptOss")
    lora = with_lora(make_model(config), target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    lora.save_pretrained(tmp_path / "a")
    error = refused(tmp_path / "a", tmp_path, make_layout(config))
    assert error.code == "no_effect"
    assert "all 12 modules" in error.message


def test_modules_without_effect_are_left_out_and_counted(tmp_path: Path) -> None:
    config = make_config("GptOss")
    lora = with_lora(make_model(config), target_modules=ATTENTION, target_parameters=EXPERT_PARAMETERS)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name and ("k_proj" in name or "layers.0.mlp.experts.base_layer" in name):
                parameter.zero_()
    report, _ = import_saved(lora, make_layout(config), tmp_path)
    assert report.warnings == ["B·A is zero in 3 of the adapter's 12 modules"]
    assert "model.layers.0.mlp.experts.down" in report.modules
    assert "model.layers.0.mlp.experts.gate_up" not in report.modules
    assert not any("k_proj" in m for m in report.modules)


def test_scale_beyond_float16(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", {k: v * 1000 for k, v in GOOD.items()}, lora_alpha=4000)
    error = refused(source, tmp_path, limits=LIMITS.model_copy(update={"dtype": "float16"}))
    assert error.code == "overflow"
    assert "float16" in error.message
