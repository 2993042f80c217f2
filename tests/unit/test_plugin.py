"""The vLLM plugin without an engine: what it imports, checks, patches, and its torch operations."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "kernels" / "lorahost_kernels"
VLLM_PACKAGE = PACKAGE / "vllm_026"


def run_python(code: str) -> str:
    """Output of `code` in a fresh interpreter, last line."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


class TestImports:
    def test_plugin_module_is_light(self) -> None:
        code = "import sys, lorahost_kernels.plugin; print([m for m in ('torch', 'vllm') if m in sys.modules])"
        assert run_python(code) == "[]"

    def test_only_one_package_imports_vllm_and_none_imports_the_server(self) -> None:
        for path in PACKAGE.rglob("*.py"):
            imported = {name.partition(".")[0] for name in imported_modules(path)}
            assert "lorahost" not in imported, path
            assert "vllm" not in imported or VLLM_PACKAGE in path.parents, path


class TestRegister:
    def test_register_twice_patches_once(self) -> None:
        code = """
import json
from lorahost_kernels import plugin
plugin.register()
from lorahost_kernels.vllm_026 import install, patching
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as manager
first = manager.add_adapter
plugin.register()
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
print(json.dumps([install.is_installed(), first is manager.add_adapter, wrapper.__name__, patching.applied()]))
"""
        installed, same, wrapper, patches = json.loads(run_python(code))
        assert installed is True
        assert same is True
        assert wrapper == "CpuPunicaWrapper"
        assert len(patches) == len(set(patches)) == 11

    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from lorahost_kernels.vllm_026 import install

        monkeypatch.setattr(install, "_installed", False)
        for name in ("register_common", "register_cpu", "register_gpu"):
            monkeypatch.setattr(install, name, lambda name=name: pytest.fail(f"{name} was called"))
        return install

    def test_other_version_is_refused(self, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from lorahost_kernels import plugin
        from lorahost_kernels.vllm_026.patching import PluginError

        monkeypatch.setattr(install.vllm, "__version__", "0.27.1+cpu")
        with pytest.raises(PluginError, match=r"works with vLLM 0\.26\.0, but vLLM 0\.27\.1\+cpu is installed"):
            plugin.register()
        assert not install.is_installed()

    def test_changed_names_are_listed(self, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from lorahost_kernels.vllm_026 import signatures
        from lorahost_kernels.vllm_026.patching import PluginError

        manager = "vllm.lora.worker_manager:WorkerLoRAManager"
        monkeypatch.setitem(signatures.COMMON_NAMES, f"{manager}._load_adapter", "self lora_request device")
        monkeypatch.setitem(signatures.COMMON_NAMES, f"{manager}.vanished", "self")
        monkeypatch.setitem(signatures.CPU_ATTRIBUTES, manager, "moved_away")
        with pytest.raises(PluginError) as caught:
            install.install()
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 3
        assert (
            "_load_adapter: expected the parameters (self lora_request device), found (self lora_request)" in lines[0]
        )
        assert "vanished: missing" in lines[1]
        assert "attribute moved_away is gone" in lines[2]

    def test_gpu_gets_the_common_patches_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lorahost_kernels.vllm_026 import install

        called = []
        monkeypatch.setattr(install, "_installed", False)
        monkeypatch.setattr(install, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        monkeypatch.setattr(install, "register_common", lambda: called.append("common"))
        monkeypatch.setattr(install, "register_cpu", lambda: called.append("cpu"))
        monkeypatch.setattr(install, "operations", {})
        install.install()
        assert called == ["common"]
        assert set(install.operations.values()) == {"stock"}


def imported_modules(path: Path) -> set[str]:
    """Absolute modules that a file imports, at any depth of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


class TestSignatureTable:
    """The table names everything of vLLM that the package uses, found by reading the package's code."""

    @pytest.fixture(scope="class")
    @classmethod
    def names(cls) -> set[str]:
        from lorahost_kernels.vllm_026 import signatures

        return {
            *signatures.COMMON_NAMES,
            *signatures.CPU_NAMES,
            *signatures.GPU_NAMES,
            *signatures.COMMON_ATTRIBUTES,
            *signatures.CPU_ATTRIBUTES,
            *signatures.GPU_ATTRIBUTES,
        }

    @pytest.fixture(scope="class")
    @classmethod
    def attributes(cls, names: set[str]) -> set[str]:
        from lorahost_kernels.vllm_026 import signatures

        found = {name.rpartition(".")[2].rpartition(":")[2] for name in names}
        found.update((signatures.COMMON_NAMES["vllm.lora.request:LoRARequest"] or "").split())
        for table in (signatures.COMMON_ATTRIBUTES, signatures.CPU_ATTRIBUTES, signatures.GPU_ATTRIBUTES):
            for listed in table.values():
                found.update(listed.split())
        return found

    @pytest.fixture(params=sorted(VLLM_PACKAGE.glob("*.py")), ids=lambda path: path.name)
    def tree(self, request: pytest.FixtureRequest) -> ast.Module:
        return ast.parse(request.param.read_text())

    def test_imported_names(self, tree: ast.Module, names: set[str]) -> None:
        modules = {name.partition(":")[0] for name in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                used = {alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"}
                assert used <= modules
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                assert {f"{node.module}:{alias.name}" for alias in node.names} <= names

    def test_patched_names(self, tree: ast.Module, names: set[str]) -> None:
        origins = vllm_imports(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id not in ("patch", "original") or not isinstance(node.args[1], ast.Constant):
                continue
            owner, name = ast.unparse(node.args[0]), node.args[1].value
            if owner.startswith("vllm."):
                assert f"{owner}:{name}" in names
            elif owner in origins:
                assert f"{origins[owner]}.{name}" in names
            else:
                assert any(listed.endswith(f".{name}") for listed in names), owner

    def test_overridden_methods(self, tree: ast.Module, names: set[str]) -> None:
        from lorahost_kernels.vllm_026.signatures import resolve

        origins = vllm_imports(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [resolve(origins[b.id]) for b in node.bases if isinstance(b, ast.Name) and b.id in origins]
            for base in bases:
                for method in (item for item in node.body if isinstance(item, ast.FunctionDef)):
                    owners = [cls for cls in base.__mro__ if method.name in vars(cls)]
                    if method.name == "__init__" or not owners:
                        continue
                    assert any(f"{cls.__module__}:{cls.__qualname__}.{method.name}" in names for cls in owners)

    def test_attributes_of_vllm_objects(self, tree: ast.Module, attributes: set[str]) -> None:
        """vLLM's objects are untyped, so whatever is read from a parameter annotated Any counts as vLLM's."""
        ours = own_names()
        plain = {*dir(torch.Tensor), *dir(dict), *dir(list), *dir(str), "value"}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for attribute in attributes_of_untyped(function):
                assert attribute in attributes | ours | plain, f"{function.name} uses {attribute}"

    def test_private_attributes(self, tree: ast.Module, attributes: set[str]) -> None:
        private = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        }
        assert private <= attributes | own_names()


def vllm_imports(tree: ast.Module) -> dict[str, str]:
    """Local name -> `module:name` of what is imported from vLLM."""
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }


def own_names() -> set[str]:
    """Functions, methods, dataclass fields and attributes that the package defines itself."""
    found = {"lorahost_preparer", "lorahost_packed"}
    for path in VLLM_PACKAGE.glob("*.py"):
        for cls in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                if isinstance(node, ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return found


def attributes_of_untyped(function: ast.FunctionDef) -> Iterator[str]:
    """Attributes read from parameters annotated `Any`, and from variables that come from those."""
    untyped = {
        arg.arg for arg in function.args.args if arg.annotation is not None and ast.unparse(arg.annotation) == "Any"
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and root_of(node.value) in untyped:
            untyped.update(target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and root_of(node) in untyped and not node.attr.startswith("__"):
            yield node.attr


def root_of(node: ast.AST) -> str | None:
    """The variable that a chain of attributes, calls and subscripts starts at."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
