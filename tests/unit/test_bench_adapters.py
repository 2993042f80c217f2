"""Adapters and configurations that are made for an engine that is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from lorahost.adapters.importer import ImportLimits, import_adapter
from lorahost.adapters.layout import ModelLayout
from lorahost.bench import shapes
from lorahost.bench.vllm_026.adapters import make_adapters


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3-moe"])
def test_the_server_s_importer_takes_the_adapters(tmp_path: Path, name: str) -> None:
    shape = shapes.SHAPES[name]
    found = make_adapters(tmp_path, shape, 2, 8, ("attention", "experts"), 3)
    assert [path.name for path in found] == ["a0", "a1", "a2"]
    layout = ModelLayout.from_config(shape.hf_config(2), internal_router_lora=True)
    limits = ImportLimits(max_rank=8, max_bytes=1 << 30, dtype="bfloat16")
    report = import_adapter(found[2], tmp_path / "out", layout, limits)
    assert report.rank == 8
    with safe_open(found[0] / "adapter_model.safetensors", "pt") as file:
        sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert sizes == shapes.adapter_matrices(shape, 2, 8, ("attention", "experts"))
    first = (found[0] / "adapter_model.safetensors").stat().st_mtime_ns
    make_adapters(tmp_path, shape, 2, 8, ("attention", "experts"), 3)
    assert (found[0] / "adapter_model.safetensors").stat().st_mtime_ns == first


FORKED = """
import os, sys, time, torch
from pathlib import Path
from lorahost.bench.shapes import SHAPES
from lorahost.bench.vllm_026.adapters import make_adapters

torch.set_num_threads(4)
make_adapters(Path(sys.argv[1]), SHAPES["tiny-gpt-oss"], 2, 512, ("attention", "experts"), 1)
if child := os.fork():
    for _ in range(300):
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            sys.exit(0)
        time.sleep(0.1)
    os.kill(child, 9)
    sys.exit("the child hangs")
torch.ones(4_000_000).bfloat16()
os._exit(0)
"""


def test_a_process_that_made_adapters_can_be_forked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_configurations_are_json_of_their_layers(tmp_path: Path, name: str) -> None:
    shapes.write_config(shapes.SHAPES[name], 3, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert len(config.get("layer_types", [0] * 3)) == 3
