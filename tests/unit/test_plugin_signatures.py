"""The plugin's table of vLLM names: it holds for the installed vLLM, and it is complete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

VLLM_PACKAGE = Path(__file__).parents[2] / "kernels" / "lorahost_kernels" / "vllm_026"


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
            *signatures.OAI_NAMES,
            *signatures.COMMON_ATTRIBUTES,
            *signatures.CPU_ATTRIBUTES,
            *signatures.GPU_ATTRIBUTES,
            *signatures.OAI_ATTRIBUTES,
        }

    @pytest.fixture(scope="class")
    @classmethod
    def attributes(cls, names: set[str]) -> set[str]:
        from lorahost_kernels.vllm_026 import signatures

        found = {name.rpartition(".")[2].rpartition(":")[2] for name in names}
        found.update((signatures.COMMON_NAMES["vllm.lora.request:LoRARequest"] or "").split())
        tables = (signatures.COMMON_ATTRIBUTES, signatures.CPU_ATTRIBUTES, signatures.GPU_ATTRIBUTES)
        for table in (*tables, signatures.OAI_ATTRIBUTES):
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

    def test_the_gpus_table_holds_for_the_installed_vllm(self) -> None:
        from lorahost_kernels.vllm_026 import signatures

        signatures.check_signatures(cpu=False)

    def test_the_experts_table_holds_where_vllm_has_their_kernels(self) -> None:
        """A build for the CPU has none, so that only what is theirs may be missing here."""
        from lorahost_kernels.vllm_026 import signatures
        from lorahost_kernels.vllm_026.gpu_names import OAI

        theirs = {f"{OAI}:{n}" for n in ("matmul_ogs", "RoutingData", "GatherIndx", "ScatterIndx")}
        theirs.add("triton_kernels.routing:ExptData")
        problems = [
            *signatures._name_problems(signatures.OAI_NAMES),
            *signatures._attribute_problems(signatures.OAI_ATTRIBUTES),
        ]
        assert [p for p in problems if p.rpartition(": missing")[0] not in theirs] == []

    def test_names_of_imported_modules(self, tree: ast.Module, names: set[str]) -> None:
        """What is read as `alias.name` of a module of vLLM's."""
        modules = vllm_modules(tree)
        used = {
            f"{modules[node.value.id]}:{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        }
        assert used <= names

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
            elif owner in vllm_modules(tree):
                assert f"{vllm_modules(tree)[owner]}:{name}" in names
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
        # to_dict: a Hugging Face configuration's
        plain = {*dir(torch.Tensor), *dir(dict), *dir(list), *dir(str), "value", "to_dict"}
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


def vllm_modules(tree: ast.Module) -> dict[str, str]:
    """Local name -> module of vLLM's, of `import vllm.x as y`."""
    return {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname and alias.name.startswith("vllm.")
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
