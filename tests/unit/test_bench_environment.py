"""The environment of an engine step: plugins, kernels, configurations, light imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lorahost.bench import environment
from lorahost.bench.point import Point


def test_steps_import_nothing_but_the_standard_library_before_the_environment_is_set() -> None:
    code = "import lorahost.bench.engine_point, sys; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ["vllm", "torch", "click", "pydantic", "aiohttp", "numpy", "flask", "matplotlib"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SHOW = """
import json, os, sys
from importlib import metadata
from pathlib import Path
from lorahost.bench import environment
from lorahost.bench.point import Point
extra = {"LORAHOST_SKIP_UNTOUCHED": "on"}
environment.prepare(Point(sys.argv[1], kernels=sys.argv[2], extra=extra), Path(sys.argv[3]))
names = os.environ["VLLM_PLUGINS"].split(",")
points = [p for p in metadata.entry_points(group="vllm.general_plugins") if p.name in names]
loaded = {p.name: p.load().__module__ for p in points}
print(json.dumps({"env": dict(os.environ), "plugins": loaded, "count": len(points)}))
"""


@pytest.mark.parametrize(
    ("path", "kernels", "plugins", "on"),
    [
        ("base", "", {environment.WEIGHTS}, "off"),
        ("stock", "", {environment.WEIGHTS}, "off"),
        ("ours", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("ours-tuned", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("lora-base", "", {environment.WEIGHTS, "lorahost"}, "on"),
        ("lora-base", "off", {environment.WEIGHTS, "lorahost"}, "off"),
    ],
)
def test_a_path_decides_on_plugins_kernels_and_configurations(
    tmp_path: Path, path: str, kernels: str, plugins: set[str], on: str
) -> None:
    given = {**os.environ, "LORAHOST_CONFIG_DIR": "mine"}
    line = [sys.executable, "-c", SHOW, path, kernels, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=given)
    found = json.loads(done.stdout)
    assert set(found["plugins"]) == plugins
    assert found["count"] == len(plugins)
    assert found["plugins"][environment.WEIGHTS] == "lorahost.bench.vllm_026.weights"
    assert found["env"]["LORAHOST_KERNELS"] == on
    assert found["env"]["LORAHOST_SKIP_UNTOUCHED"] == "on"
    # a process that the engine starts finds them in the same place
    assert str(tmp_path / "plugins") in found["env"]["PYTHONPATH"].split(os.pathsep)
    if path == "ours-tuned":
        assert "LORAHOST_CONFIG_DIR" not in found["env"]
    else:
        assert list(Path(found["env"]["LORAHOST_CONFIG_DIR"]).iterdir()) == []


def test_the_installed_plugin_is_not_declared_twice(tmp_path: Path) -> None:
    assert any(p.name == "lorahost" for p in metadata.entry_points(group=environment.GROUP))
    line = [sys.executable, "-c", SHOW, "ours", "", str(tmp_path)]
    subprocess.run(line, capture_output=True, check=True)
    declared = (tmp_path / "plugins" / "lorahost_bench_plugins-0.dist-info" / "entry_points.txt").read_text()
    assert environment.WEIGHTS in declared
    assert "lorahost =" not in declared


@pytest.mark.parametrize("name", ["LORAHOST_KERNELS", "LORAHOST_CONFIG_DIR", "LORAHOST_PORT"])
def test_variables_that_a_step_sets_itself_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"extra {name}: the step sets these itself"):
        Point("ours", extra={name: "x", "enforce_eager": True})
