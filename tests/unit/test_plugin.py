"""The vLLM plugin without an engine: what it imports, checks, patches, and its torch operations."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lorahost_kernels
from lorahost_kernels.operations import MOE, OPERATIONS

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

        self.register_gpu = install.register_gpu
        monkeypatch.setattr(install, "_installed", False)
        for name in ("register_common", "register_cpu", "register_gpu"):
            monkeypatch.setattr(install, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
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

    @pytest.mark.parametrize(
        ("kernels", "cuda", "reason"),
        [("off", True, "LORAHOST_KERNELS=off"), ("on", False, "NVIDIA"), (None, False, "NVIDIA")],
    )
    def test_vllms_own_kernels_without_ours(
        self, install: Any, monkeypatch: pytest.MonkeyPatch, kernels: str | None, cuda: bool, reason: str
    ) -> None:
        called = self.on_a_gpu(install, monkeypatch, kernels, cuda)
        install.install()
        assert called == ["common", "slices"]
        assert set(install.operations.values()) == {"stock"}
        assert install.operations.keys() == install.kernels.keys() == set(OPERATIONS)
        for found in install.kernels.values():
            assert (found["path"], found["fallback"]) == ("stock", False)
            assert reason in found["reason"]

    @pytest.mark.parametrize("kernels", ["on", None])
    def test_our_kernels_are_the_default_on_a_gpu(
        self, install: Any, monkeypatch: pytest.MonkeyPatch, kernels: str | None
    ) -> None:
        called = self.on_a_gpu(install, monkeypatch, kernels, cuda=True)
        install.install()
        assert called == ["common", "ours", "slices"]
        assert set(install.operations.values()) == {"triton"}
        assert "not checked yet" in install.kernels["shrink"]["reason"]

    def test_a_misspelt_choice_of_kernels_is_refused(self, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from lorahost_kernels.vllm_026.patching import PluginError

        called = self.on_a_gpu(install, monkeypatch, "yes", cuda=True)
        with pytest.raises(PluginError, match="LORAHOST_KERNELS='yes' must be on or off"):
            install.install()
        assert called == []

    @pytest.mark.parametrize("name", ["LORAHOST_SKIP_UNTOUCHED", "LORAHOST_BUSY_FIRST"])
    def test_a_misspelt_switch_stops_the_start(self, install: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        from lorahost_kernels.vllm_026.patching import PluginError

        called = self.on_a_gpu(install, monkeypatch, "on", cuda=True)
        monkeypatch.setenv(name, "yes")
        with pytest.raises(PluginError, match=f"{name}='yes' must be on or off"):
            install.install()
        assert called == []

    @pytest.mark.parametrize(
        ("switch", "problem", "found"),
        [
            (None, "", ("busy-first", False)),
            ("on", "", ("busy-first", False)),
            ("on", "no such option", ("stock", True)),
            ("off", "", ("stock", False)),
        ],
    )
    def test_the_order_of_the_experts_tiles_is_recorded(
        self,
        install: Any,
        monkeypatch: pytest.MonkeyPatch,
        switch: str | None,
        problem: str,
        found: tuple[str, bool],
    ) -> None:
        import vllm.utils.import_utils as imports

        from lorahost_kernels.vllm_026 import expert_tiles

        self.on_a_gpu(install, monkeypatch, "on", cuda=True)
        monkeypatch.setattr(imports, "has_triton_kernels", lambda: True)
        monkeypatch.setattr(expert_tiles, "apply_patches", lambda: problem)
        monkeypatch.delenv("LORAHOST_BUSY_FIRST", raising=False)
        if switch:
            monkeypatch.setenv("LORAHOST_BUSY_FIRST", switch)
        # vLLM's loggers, once set up by another test, hand nothing on to pytest
        warned: list[str] = []
        monkeypatch.setattr(install.log, "warning", lambda text, *args: warned.append(text % args))
        install.install()
        fact = install.kernels["expert_tiles"]
        assert (fact["path"], fact["fallback"]) == found
        assert problem in fact["reason"]
        assert [problem in line for line in warned] == ([True] if problem else [])

    def on_a_gpu(self, install: Any, monkeypatch: pytest.MonkeyPatch, kernels: str | None, cuda: bool) -> list[str]:
        """Sets the platform and LORAHOST_KERNELS; what is patched is put into the list."""
        from lorahost_kernels import vllm_026

        called: list[str] = []
        for name in ("operations", "kernels"):
            monkeypatch.setattr(install, name, {})
        monkeypatch.setattr(install, "register_gpu", self.register_gpu)
        monkeypatch.setattr(install, "register_common", lambda: called.append("common"))
        monkeypatch.setattr(install, "check_signatures", lambda cpu: None)
        platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: cuda)
        monkeypatch.setattr(install, "current_platform", platform)
        for name, said in (("gpu_punica", "ours"), ("tp_slices", "slices")):
            module = SimpleNamespace(apply_patches=lambda said=said: called.append(said))
            monkeypatch.setitem(sys.modules, f"{vllm_026.__name__}.{name}", module)
            monkeypatch.setattr(vllm_026, name, module, raising=False)
        monkeypatch.delenv("LORAHOST_KERNELS", raising=False)
        if kernels is not None:
            monkeypatch.setenv("LORAHOST_KERNELS", kernels)
        return called


class TestChoosePaths:
    """What the self-check finds decides, is recorded, and enters the key of vLLM's compile cache."""

    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from lorahost_kernels.vllm_026 import install

        for name in ("operations", "kernels"):
            monkeypatch.setattr(install, name, {})
        return install

    def outcomes(self, monkeypatch: pytest.MonkeyPatch, moe: Any) -> None:
        from lorahost_kernels import self_check

        found = {
            name: self_check.Outcome(moe if name in MOE else "triton", f"{name}!", 0.25, 1.0) for name in OPERATIONS
        }
        monkeypatch.setattr(self_check, "paths_for", lambda *_: self_check.Paths(moe, "triton", found))

    def test_a_fallback_is_recorded(self, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes(monkeypatch, "stock")
        config = SimpleNamespace(additional_config={"mine": 1})
        monkeypatch.setattr(install, "get_current_vllm_config_or_none", lambda: config)
        paths = install.choose_paths("cpu", torch.float16)
        assert (paths.moe, paths.dense) == ("stock", "triton")
        assert config.additional_config == {
            "mine": 1,
            "lorahost_kernels": {"version": lorahost_kernels.__version__, "moe": "stock", "dense": "triton"},
        }
        assert install.operations == {name: "stock" if name in MOE else "triton" for name in OPERATIONS}
        assert install.kernels["shrink"] == {
            "path": "triton", "reason": "shrink!", "fallback": False, "error": 0.25, "seconds": 1.0,
        }  # fmt: skip
        assert install.kernels["work_list"]["fallback"] is True

    @pytest.mark.parametrize("config", [None, SimpleNamespace(additional_config=object())])
    def test_a_compile_cache_that_can_not_be_told_is_said(
        self, install: Any, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, config: Any
    ) -> None:
        self.outcomes(monkeypatch, "triton")
        monkeypatch.setattr(install, "get_current_vllm_config_or_none", lambda: config)
        install.choose_paths("cpu", torch.float16)
        assert "compile cache does not know" in plugin_log.text


def imported_modules(path: Path) -> set[str]:
    """Absolute modules that a file imports, at any depth of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found
