"""The shipped tuned configurations are found without configuration: from the checkout, the wheel, and so the image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lorahost_kernels.tuned import load

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tuned_configs").rglob("*.json"))
# an engine's start, without a GPU: prints the folder, what was refused, and each operation's rows
START = """
import lorahost_kernels
from lorahost_kernels.tuned.shape import KNOWN
from lorahost_kernels.tuned.start import Device, load_table
table, notes = load_table(Device("NVIDIA H200", (9, 0), 132, 232448), KNOWN["gpt-oss-20b"], 8, {})
print(lorahost_kernels.__file__)
print(notes["folder"])
print(notes["refused"])
print(*[sum(p.adapters == 8 for p in table.families[family].points.values()) for family in ("moe", "dense")])
"""


def started(folder: Path, kernels: Path) -> list[str]:
    """The lines of START in a fresh interpreter that works in `folder` and has the package from `kernels`."""
    environ = {name: value for name, value in os.environ.items() if name != load.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", START], cwd=folder, env={**environ, "PYTHONPATH": str(kernels)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()


def copied_by_the_image() -> list[str]:
    """What the Dockerfile's stage that builds the wheel copies next to pyproject.toml."""
    stage = re.split(r"^FROM .*\n", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1]
    lines = re.findall(r"^COPY (?!--)(.+) (\S+)$", stage, re.MULTILINE)
    # into the same place as in the checkout
    return [name for names, to in lines for name in names.split() if to in ("./", name) and "/" not in name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked, built from what the image's build has."""
    build, site = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("site")
    for name in copied_by_the_image():
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, build / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, build / name)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(build / "dist")],
        cwd=build, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    [made] = (build / "dist").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)
    return site


def test_the_checkout_finds_its_files(tmp_path: Path) -> None:
    package, folder, refused, points = started(tmp_path, ROOT / "kernels")
    assert Path(package).parent == ROOT / "kernels" / "lorahost_kernels"
    assert Path(folder) == ROOT / "tuned_configs"
    assert (refused, points) == ("[]", "28 28")


def test_the_wheel_has_all_files_and_finds_them(wheel: Path, tmp_path: Path) -> None:
    assert "tuned_configs/NVIDIA_H200/gpt-oss-20b.json" in SHIPPED
    for name in SHIPPED:
        assert (wheel / "lorahost_kernels" / name).read_bytes() == (ROOT / name).read_bytes()
    package, folder, refused, points = started(tmp_path, wheel)
    assert Path(package).parent == wheel / "lorahost_kernels"
    assert Path(folder) == wheel / "lorahost_kernels" / "tuned_configs"
    assert (refused, points) == ("[]", "28 28")


def test_the_image_copies_the_files_into_its_wheel() -> None:
    assert {"pyproject.toml", "kernels", "tuned_configs"} <= set(copied_by_the_image())
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert "!tuned_configs" in patterns
    # what comes after the list of places would take files out again
    later = [pattern.removeprefix("**/") for pattern in patterns[1:] if not pattern.startswith("!")]
    steps = {step for name in SHIPPED for step in (name, *Path(name).parts)}
    assert [(step, pattern) for step in steps for pattern in later if fnmatch(step, pattern)] == []


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_both_images_install_that_wheel_and_set_no_other_folder(target: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    stage = re.split(r"^FROM .* AS (\w+)\n", text, flags=re.MULTILINE)
    body = stage[stage.index(target) + 1]
    assert "COPY --from=wheel /build/dist/ dist/" in body
    assert re.search(r"install .*--no-deps --no-index dist/\*\.whl", body)
    assert load.VARIABLE not in text
