"""What the two packages promise about themselves: light imports, one place for vLLM, clean and short files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import lorahost
import lorahost_kernels

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "src" / "lorahost", ROOT / "kernels" / "lorahost_kernels", ROOT / "deploy" / "lorahost_deploy")
ENGINE_PACKAGES = (
    SOURCES[0] / "engine" / "vllm_026",
    SOURCES[1] / "vllm_026",
    SOURCES[0] / "bench" / "vllm_026",
)
MAX_LINES = 300
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".txt", ".lock", ".in", ".cfg", ".jinja", ""}
# written so that this file does not contain what it looks for
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
INDEX_HOST = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|wheels\.vllm|--(extra-)?index-url|--find-links")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|home|root|Users)/\w|/tmp/\w")


def modules() -> list[Path]:
    return sorted(path for source in SOURCES for path in source.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def tracked() -> list[Path]:
    """Files that git knows or would take, outside the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [ROOT / line for line in listed.stdout.splitlines() if not line.startswith("tests/")]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def loaded_by(code: str, *names: str) -> list[str]:
    """Which of `names` a fresh interpreter has imported after `code`."""
    program = f"{code}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_packages_costs_nothing() -> None:
    heavy = ("torch", "vllm", "flask", "gunicorn", "numpy", "pydantic", "triton", "transformers")
    assert loaded_by("import lorahost, lorahost_kernels", *heavy) == []


def test_the_cli_and_the_http_front_need_neither_torch_nor_vllm() -> None:
    code = "import lorahost.cli, lorahost.server, lorahost.http.app, lorahost.http.gunicorn_app"
    assert loaded_by(code, "torch", "vllm", "transformers", "triton") == []


def test_adapters_are_imported_without_torch() -> None:
    names = sorted(path.stem for path in (SOURCES[0] / "adapters").glob("*.py") if path.stem != "__init__")
    code = "import " + ", ".join(f"lorahost.adapters.{name}" for name in names)
    assert loaded_by(code, "torch", "vllm", "safetensors.torch", "boto3", "flask") == []


def test_the_public_surface_is_a_version() -> None:
    assert lorahost.__all__ == ["__version__"]
    assert lorahost.__version__ == metadata.version("lorahost")
    fresh = "import lorahost, lorahost_kernels\nfor p in (lorahost, lorahost_kernels):\n"
    fresh += "    print(p.__name__, *sorted(n for n in vars(p) if not n.startswith('_')))\nraise SystemExit"
    done = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["lorahost", "lorahost_kernels"]
    assert Path(lorahost_kernels.__file__).parent == SOURCES[1]


def test_vllm_finds_the_plugin() -> None:
    [point] = [p for p in metadata.entry_points(group="vllm.general_plugins") if p.name == "lorahost"]
    assert point.value == "lorahost_kernels.plugin:register"
    assert callable(point.load())


def test_the_command_is_installed() -> None:
    [point] = [p for p in metadata.entry_points(group="console_scripts") if p.name == "lorahost"]
    assert point.value == "lorahost.cli:main"


def test_deployment_needs_neither_torch_nor_vllm_and_the_server_no_boto3() -> None:
    code = "import lorahost_deploy.cli, lorahost_deploy.local.command, lorahost_deploy.local.server"
    assert loaded_by(code, "torch", "vllm", "transformers") == []
    code = "import lorahost.cli, lorahost.server, lorahost.http.app"
    assert loaded_by(code, "boto3", "botocore", "lorahost_deploy", "moto", "yaml", "rich") == []
    # the help lists all commands, and still costs no AWS client
    code = "from click.testing import CliRunner\nfrom lorahost.cli import main\nassert 'local-aws' in CliRunner()"
    assert loaded_by(code + ".invoke(main, ['-h']).output", "boto3", "botocore", "moto") == []


def test_only_three_packages_import_vllm() -> None:
    assert all(package.is_dir() for package in ENGINE_PACKAGES)
    users = {path for path in modules() if "vllm" in imported(path)}
    assert {path for path in users if not any(p in path.parents for p in ENGINE_PACKAGES)} == set()
    assert {p for p in ENGINE_PACKAGES if any(p in path.parents for path in users)} == set(ENGINE_PACKAGES)


def test_the_server_uses_torch_only_through_the_engine() -> None:
    users = {path for path in modules() if SOURCES[0] in path.parents and {"torch", "triton"} & set(imported(path))}
    assert {path for path in users if not any(p in path.parents for p in ENGINE_PACKAGES)} == set()


def test_the_kernels_know_nothing_of_the_server() -> None:
    assert [path for path in modules() if SOURCES[1] in path.parents and "lorahost" in imported(path)] == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_files_fit_the_limit(source: Path) -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in source.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("pattern", [UNFINISHED, INDEX_HOST, MACHINE_PATH], ids=["unfinished", "index", "machine"])
def test_no_file_holds_what_belongs_elsewhere(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
    assert len(tracked()) > 100


def test_the_patterns_find_what_they_are_for() -> None:
    assert UNFINISHED.search("# TO" + "DO: later")
    assert INDEX_HOST.search("--index-url https://example")
    for path in (*(f"/{top}/x" for top in ("work", "home", "tmp")), f'open("/{"root"}/x")'):
        assert MACHINE_PATH.search(path), path
    assert not MACHINE_PATH.search("https://host/home/page")


def test_every_package_is_in_the_wheel() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {ROOT / name for name in wheel["packages"]} == set(SOURCES)
    assert all((ROOT / name).is_dir() for name in wheel["force-include"])
    for source in SOURCES:
        folders = {path.parent for path in source.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
