from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lorahost import __version__, client, preflight, settings_page
from lorahost.cli import main
from lorahost.preflight import Finding
from lorahost.settings import known_variables

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
COMMAND = Path(sys.executable).with_name("lorahost")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LORAHOST_", "SM_VLLM_", "OPTION_", "SAGEMAKER_", "HF_MODEL_ID")):
            monkeypatch.delenv(name)


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environ)


def test_version_and_help() -> None:
    assert __version__ in run("--version").output
    for command in ("serve", "doctor", "adapters"):
        assert command in run("-h").output


@pytest.mark.parametrize("environ", [{"LORAHOST_PORT": "http"}, {"LORAHOST_PROT": "8080"}, {"SM_VLLM_API_KEY": "k"}])
def test_serve_with_a_bad_setting_is_one_json_line(environ: dict[str, str]) -> None:
    result = run("serve", **environ)
    assert result.exit_code == 30
    [line] = result.output.splitlines()
    said = json.loads(line)
    assert (said["level"], said["check"], said["exit_code"]) == ("error", "settings", 30)
    assert next(iter(environ)) in said["message"]


def test_serve_stops_at_the_first_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("model", "fine"), Finding("shm", "too small", 36), Finding("port", "taken", 38)]
    monkeypatch.setattr(preflight, "run", lambda *_: iter(found))
    result = run("serve")
    assert result.exit_code == 36
    assert json.loads(result.output) == {"level": "error", "check": "shm", "message": "too small", "exit_code": 36}


def test_doctor_says_all_checks_and_whether_serve_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding("model", "fine"), Finding("port", "taken", 38)]))
    result = run("doctor", LORAHOST_ENGINE="fake")
    assert result.exit_code == 1
    assert "ok    model     fine" in result.output
    assert "FAIL  port      taken" in result.output
    monkeypatch.setattr(preflight, "run", lambda *_: iter([Finding("model", "fine")]))
    result = run("doctor", "--json", LORAHOST_ENGINE="fake")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["ok"] is True
    assert report["checks"] == [{"check": "model", "ok": True, "message": "fine"}]
    assert report["versions"]["lorahost"] == __version__


def test_doctor_lists_every_setting() -> None:
    result = run("doctor", "--settings")
    assert result.exit_code == 0
    assert [name for name in known_variables() if name not in result.output] == []


def test_doctor_prints_the_settings_page() -> None:
    assert run("doctor", "--settings-page").output == settings_page.page()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def add(url: str, name: str, src: str, **options: bool) -> client.Answer:
        made.append((url, name, src, options))
        return 200, {"status": "registered"}

    def rm(url: str, name: str) -> client.Answer:
        made.append((url, name))
        return 404, {"error": {"message": "no adapter"}}

    monkeypatch.setattr(client, "add", add)
    monkeypatch.setattr(client, "rm", rm)
    return made


def test_adapters_add(calls: list[Any]) -> None:
    result = run("adapters", "add", "--url", "http://server:1", "poet", "s3://b/poet", "--pin")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"status": "registered"})
    run("adapters", "add", "poet", "s3://b/poet", "--no-preload", LORAHOST_URL="http://server:2")
    assert calls == [
        ("http://server:1", "poet", "s3://b/poet", {"preload": True, "pin": True}),
        ("http://server:2", "poet", "s3://b/poet", {"preload": False, "pin": False}),
    ]


def test_adapters_rm_that_is_refused(calls: list[Any]) -> None:
    result = run("adapters", "rm", "poet")
    assert calls == [("http://localhost:8080", "poet")]
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no adapter" in result.stderr


def test_adapters_ls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ls", lambda url: (200, {"adapters": [{"name": "poet", "state": "ready"}]}))
    result = run("adapters", "ls")
    assert (result.exit_code, "poet  ready" in result.stdout) == (0, True)
    monkeypatch.setattr(client, "ls", lambda url: (503, {"error": {"message": "no answer"}}))
    result = run("adapters", "ls")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no answer" in result.stderr


def test_adapters_check_says_why_not(tmp_path: Path) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "model_type": "none"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("adapters", "check", str(tmp_path), "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "NoSuchForCausalLM" in json.loads(result.stderr)["error"]["message"]


def demo_adapters() -> list[Path]:
    return sorted(path.parent for path in (DEMO / "adapters").glob("*/adapter_config.json"))


@pytest.mark.skipif(not demo_adapters(), reason="the demo's adapters are not there")
def test_the_demos_adapters_can_be_served_on_its_model() -> None:
    for adapter in demo_adapters():
        result = run("adapters", "check", str(adapter), "--model", str(DEMO / "model"))
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["servable"] is True
        assert any(module.endswith("experts.gate_up") for module in report["modules"])
    result = run("adapters", "check", str(demo_adapters()[0]), "--model", str(DEMO / "model"), "--max-rank", "2")
    assert result.exit_code == 1
    assert "2" in json.loads(result.stderr)["error"]["message"]


@pytest.mark.skipif(not (DEMO / "model" / "config.json").is_file(), reason="the demo's model is not there")
def test_doctor_as_a_process_of_its_own(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "SM_VLLM_MODEL": str(DEMO / "model"),
        "SM_VLLM_MAX_LORA_RANK": "16",
        "LORAHOST_WORK_DIR": str(tmp_path),
        "LORAHOST_HOST": "127.0.0.1",
        "LORAHOST_PORT": "18099",
    }
    done = subprocess.run([COMMAND, "doctor", "--json"], env=environ, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert {c["check"]: c["ok"] for c in report["checks"]}["model"] is True
    assert report["adapters"]["architecture"] == "Qwen3MoeForCausalLM"
    assert report["adapters"]["max_lora_rank"] == 16
    assert report["adapters"]["flags"] == ["--max-lora-rank", "16"]
    assert done.returncode == (0 if report["ok"] else 1)


def test_serve_as_a_process_of_its_own_refuses_a_bad_setting() -> None:
    environ = {**os.environ, "LORAHOST_MAX_RUNNING": "none"}
    done = subprocess.run([COMMAND, "serve"], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 30
    [line] = done.stdout.splitlines()
    assert "LORAHOST_MAX_RUNNING='none'" in json.loads(line)["message"]
    assert done.stderr == ""
