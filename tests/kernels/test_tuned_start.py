"""What an engine's start finds: the files of its GPU and model, and what it says of those that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernels.tuned_engine import A10, CONFIG, H200
from tests.kernels.tuned_files import GPU, document, fused_document, saved

from lorahost_kernels import configs
from lorahost_kernels.tuned import active as in_use
from lorahost_kernels.tuned import load
from lorahost_kernels.tuned.shape import KNOWN
from lorahost_kernels.tuned.start import load_table, start


@pytest.fixture(autouse=True)
def defaults_again() -> Iterator[None]:
    yield
    in_use.deactivate()


def variables(folder: Path, **more: str) -> dict[str, str]:
    return {"LORAHOST_CONFIG_DIR": str(folder), **more}


def test_start_finds_the_gpus_files(tmp_path: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    saved(tmp_path, document(gpu="NVIDIA A10G"), "NVIDIA_A10G.json")
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path))
    assert found["gpu"] == GPU
    assert {op: r["source"] for op, r in found["operations"].items()} == dict.fromkeys(found["operations"], "exact")
    assert len(found["operations"]) == 6
    lines = [r.message for r in plugin_log.records]
    assert len([line for line in lines if line.startswith("lorahost ")]) == 6
    assert "lorahost down_expand: exact, 2 rows, M=16..512, ranks 32 (gpt-oss-20b.json)" in lines
    json.dumps(found)


def test_the_log_names_the_family_of_a_fused_engines_experts(
    tmp_path: Path, plugin_log: pytest.LogCaptureFixture
) -> None:
    def lines(content: object) -> list[str]:
        plugin_log.clear()
        saved(tmp_path, content)
        json.dumps(start(CONFIG, 8, device=H200, environ=variables(tmp_path), fused=True))
        return [r.message for r in plugin_log.records if r.message.startswith("lorahost ")]

    found = lines(fused_document())
    assert "lorahost expand_topk_sum: exact, 1 moe_fused rows, M=16..16, ranks 32 (gpt-oss-20b.json)" in found
    assert "lorahost expand_swiglu: exact, 2 moe_fused rows, M=16..512, ranks 32 (gpt-oss-20b.json)" in found
    assert "lorahost shrink: exact, 2 rows, M=16..512, ranks 32 (gpt-oss-20b.json)" in found
    assert len(found) == 7
    found = lines(document())
    assert "lorahost down_expand: exact, 2 moe rows, M=16..512, ranks 32 (gpt-oss-20b.json)" in found
    [swiglu] = [line for line in found if "expand_swiglu" in line]
    assert swiglu.startswith("lorahost expand_swiglu: defaults (sm_90, with PDL")
    assert swiglu.endswith("no moe rows for NVIDIA H200 and this shape")


def test_another_gpu_takes_no_rows_and_says_its_class(tmp_path: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    found = start(CONFIG, 8, device=A10, environ=variables(tmp_path))
    assert {r["source"] for r in found["operations"].values()} == {"default"}
    line = "defaults (sm_86, no PDL, programs for 80 multiprocessors, 99 KiB shared), no rows for NVIDIA A10G"
    assert any(line in r.message for r in plugin_log.records)


def test_a_bad_file_is_refused_aloud_and_the_rest_is_used(tmp_path: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, document())
    saved(tmp_path, document(note=1), "NVIDIA_H200/a.json")
    saved(tmp_path, document(gpu="NVIDIA H100"), "NVIDIA_H200/b.json")
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path))
    assert len(found["refused"]) == 2
    assert "note: Extra inputs" in found["refused"][0]
    assert "gpu is 'NVIDIA H100'" in found["refused"][1]
    assert [r.levelname for r in plugin_log.records if "refused" in r.message] == ["ERROR", "ERROR"]
    assert found["operations"]["shrink"]["source"] == "exact"


def test_an_unknown_model_or_folder_starts_with_the_defaults(
    tmp_path: Path, plugin_log: pytest.LogCaptureFixture
) -> None:
    assert start({"model_type": "bert"}, 8, device=H200, environ={}) == {"active": False, "operations": {}}
    assert "model_type 'bert' is none of" in plugin_log.text
    found = start(CONFIG, 8, device=H200, environ=variables(tmp_path / "none"))
    assert "none is no directory" in found["refused"][0]
    assert configs.chooser() is not None


def test_other_models_files_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, document())
    made, _ = load_table(H200, KNOWN["gpt-oss-120b"], 8, variables(tmp_path))
    assert not made.families["moe"].points
    # attention has the same sizes
    assert made.families["dense"].points


def test_without_the_variable_the_package_or_the_checkout_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load.folder({"LORAHOST_CONFIG_DIR": "/x"}) == Path("/x")
    assert load.folder({}) == Path(__file__).parents[2] / "tuned_configs"
    # in a wheel the folder is inside the package
    site = tmp_path / "lorahost_kernels"
    (site / "tuned_configs").mkdir(parents=True)
    monkeypatch.setattr(load, "__file__", str(site / "tuned" / "load.py"))
    assert load.folder({}) == site / "tuned_configs"
    (site / "tuned_configs").rmdir()
    assert load.folder({}) is None
    assert load.gpu_key("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3"
    assert load.gpu_key("NVIDIA A100-SXM4-80GB") == "NVIDIA_A100_SXM4_80GB"


def test_importing_reads_nothing_and_needs_no_torch() -> None:
    code = "import os\nos.environ['LORAHOST_CONFIG_DIR'] = '/none'\nimport lorahost_kernels.tuned.active as t, sys\n"
    code += "assert t.report() == {'active': False, 'operations': {}}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_kernels_alone_need_no_pydantic() -> None:
    code = "import sys\nsys.modules['pydantic'] = None\nimport lorahost_kernels.ops.layer, lorahost_kernels.self_check"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
