"""The table of vLLM names that the engine package uses: it holds for the installed vLLM, and it is complete."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from lorahost.engine import vllm_026
from lorahost.engine.vllm_026 import signatures
from lorahost.engine.vllm_026.host import VllmHost
from lorahost.errors import UnavailableError

PACKAGE = Path(vllm_026.__file__).parent
# what an expression in the package's code is, by its text
RECEIVERS = {
    "self._engine": "vllm.v1.engine.async_llm:AsyncLLM",
    "engine": "vllm.v1.engine.async_llm:AsyncLLM",
    "AsyncLLM": "vllm.v1.engine.async_llm:AsyncLLM",
    "self._state.openai_serving_models": "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
    "self._models": "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
    "renderer": "vllm.renderers.online_renderer:OnlineRenderer",
    "config": "vllm.config:VllmConfig",
    "lora": "vllm.config:LoRAConfig",
    "config.device_config": "vllm.config:DeviceConfig",
    "config.model_config": "vllm.config:ModelConfig",
    "config.scheduler_config": "vllm.config:SchedulerConfig",
    "info": "vllm.entrypoints.openai.engine.protocol:ErrorInfo",
    "response": "vllm.entrypoints.openai.engine.protocol:ErrorResponse",
    "ErrorResponse": "vllm.entrypoints.openai.engine.protocol:ErrorResponse",
    "iteration_stats": "vllm.v1.metrics.stats:IterationStats",
    "entry": "vllm.logprobs:Logprob",
    "final": "vllm.outputs:RequestOutput",
    "final.outputs[0]": "vllm.outputs:CompletionOutput",
    "current_platform": "vllm.platforms.interface:Platform",
    "AsyncEngineArgs": "vllm.engine.arg_utils:AsyncEngineArgs",
    "UsageContext": "vllm.usage.usage_lib:UsageContext",
    "kind": "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
}
# the same words for something of our own
OURS = {"arguments.py": {"lora"}}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name != "signatures.py":
            yield path.name, ast.parse(path.read_text())


def imported() -> set[str]:
    found: set[str] = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def read() -> set[str]:
    """`module:class.attribute` of everything that the code reads from an object of vLLM's."""
    found: set[str] = set()
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                receiver = ast.unparse(node.value)
                if receiver in RECEIVERS and receiver not in OURS.get(file, set()):
                    found.add(f"{RECEIVERS[receiver]}.{node.attr}")
    return found


def in_attributes() -> set[str]:
    return {f"{name}.{attribute}" for name, text in signatures.ATTRIBUTES.items() for attribute in text.split()}


def test_the_installed_vllm_is_the_one_that_the_table_describes() -> None:
    signatures.check_signatures()


def test_every_import_is_in_the_table() -> None:
    known = signatures.NAMES
    missing = {
        name for name in imported() if name not in known and not any(entry.startswith(f"{name}.") for entry in known)
    }
    assert missing == set()
    assert len(imported()) > 10


def test_every_attribute_that_is_read_is_in_the_table() -> None:
    known = set(signatures.NAMES) | in_attributes()
    assert read() - known == set()
    assert len(read()) > 25


def test_the_servers_state_is_read_as_the_table_says() -> None:
    attributes = {
        node.attr
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._state"
    }
    known = {name.rpartition(".")[2] for name in in_attributes() if ":init_" in name}
    assert attributes == known


def problem(monkeypatch: pytest.MonkeyPatch, table: str, name: str, value: str | None) -> str:
    monkeypatch.setitem(getattr(signatures, table), name, value)
    with pytest.raises(UnavailableError) as refused:
        signatures.check_signatures()
    assert refused.value.code == "engine_mismatch"
    assert "0.26.0" in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("table", "name", "value", "message"),
    [
        ("NAMES", "vllm.lora.request:NoSuchName", None, "NoSuchName is missing"),
        ("NAMES", "vllm.no_such_module:Name", None, "vllm.no_such_module:Name is missing"),
        ("NAMES", "vllm.lora.request:LoRARequest", "lora_name lora_int_id lora_path rank", "has no parameter rank"),
        ("NAMES", "vllm.lora.request:LoRARequest", "lora_name lora_path", "needs lora_int_id"),
        ("ATTRIBUTES", "vllm.config:LoRAConfig", "max_loras no_such_field", "vllm.config:LoRAConfig has no no_such"),
        ("ATTRIBUTES", "vllm.config:NoSuchConfig", "x", "vllm.config:NoSuchConfig is missing"),
    ],
)
def test_what_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, table: str, name: str, value: str | None, message: str
) -> None:
    assert message in problem(monkeypatch, table, name, value)


def test_all_differences_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(signatures.NAMES, "vllm:first", None)
    message = problem(monkeypatch, "ATTRIBUTES", "vllm.config:Second", "x")
    assert "vllm:first" in message
    assert "Second" in message


def test_the_host_refuses_to_start_on_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(signatures.NAMES, "vllm.v1.engine.async_llm:AsyncLLM.gone", "")
    host = VllmHost(model="/none", base_name="base", tokens=(), lora=None)
    with pytest.raises(UnavailableError, match=r"AsyncLLM\.gone is missing"):
        asyncio.run(host.start())
