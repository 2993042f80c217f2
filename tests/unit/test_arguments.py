from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lorahost.engine.vllm_026 import arguments
from lorahost.engine.vllm_026.arguments import LoraDefaults, parse, prepare_environment, with_defaults
from lorahost.environment import flag_value
from lorahost.errors import InvalidRequestError

DEFAULTS = LoraDefaults(max_loras=8, max_cpu_loras=65, max_lora_rank=32)
COMPILE_KEY = {"lorahost": arguments.lorahost.__version__, "kernels": "on"}


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("CHAT_TEMPLATE", "VLLM_PORT", "VLLM_HOST_IP", "SAGEMAKER_SAFE_PORT_RANGE", "LORAHOST_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def line(*tokens: str, lora: LoraDefaults | None = DEFAULTS, model: str = "/models/m") -> list[str]:
    return with_defaults(tokens, model=model, base_name="base", lora=lora)


def values(found: list[str], *flags: str) -> list[str | None]:
    return [flag_value(found, flag) for flag in flags]


def test_what_is_open_is_filled_in() -> None:
    found = line("--max-model-len", "128")
    assert found[:4] == ["--model", "/models/m", "--max-model-len", "128"]
    assert "--enable-lora" in found
    assert values(found, "--max-loras", "--max-cpu-loras", "--max-lora-rank") == ["8", "65", "32"]
    assert values(found, "--served-model-name", "--worker-extension-cls") == ["base", arguments.WORKER_EXTENSION]
    assert json.loads(flag_value(found, "--additional-config") or "") == COMPILE_KEY


def test_what_the_user_set_stays() -> None:
    given = ("--served-model-name", "mine", "--max-lora-rank", "64", "--additional-config", "{}", "--enable-lora")
    found = line(*given)
    for flag in given[::2]:
        assert found.count(flag) == 1
    assert values(found, "--served-model-name", "--max-lora-rank", "--additional-config") == ["mine", "64", "{}"]


@pytest.mark.parametrize(
    ("tokens", "slots", "adapters"),
    [
        (("--max-cpu-loras", "4"), "4", "4"),
        (("--max-cpu-loras", "100"), "8", "100"),
        (("--max-loras", "80"), "80", "80"),
        (("--max-loras", "2"), "2", "65"),
        (("--max-loras", "3", "--max-cpu-loras", "5"), "3", "5"),
        (("--max-loras", "many"), "many", "65"),
    ],
)
def test_defaults_give_way_to_one_flag_of_a_pair(tokens: tuple[str, ...], slots: str, adapters: str) -> None:
    assert values(line(*tokens), "--max-loras", "--max-cpu-loras") == [slots, adapters]


def test_the_base_model_alone() -> None:
    assert [t for t in line(lora=None) if "lora" in t] == []


@pytest.mark.parametrize("own", [None, "chat_template.jinja", "tokenizer_config.json"])
def test_the_template_variable_is_for_models_without_one(
    environ: pytest.MonkeyPatch, tmp_path: Path, own: str | None
) -> None:
    environ.setenv("CHAT_TEMPLATE", "{{ messages }}")
    if own is not None:
        (tmp_path / own).write_text('{"chat_template": "{{ own }}"}')
    expected = "{{ messages }}" if own is None else None
    assert flag_value(line(model=str(tmp_path)), "--chat-template") == expected
    assert values(line("--chat-template", "/t", model=str(tmp_path)), "--chat-template") == ["/t"]


def test_vllm_accepts_the_line() -> None:
    args = parse(line("--max-model-len", "4k", "--max-num-seqs", "16"))
    assert (args.model, args.served_model_name, args.max_model_len) == ("/models/m", ["base"], 4000)
    assert (args.enable_lora, args.max_loras, args.max_cpu_loras, args.max_lora_rank) == (True, 8, 65, 32)
    assert args.additional_config == COMPILE_KEY
    assert args.worker_extension_cls == arguments.WORKER_EXTENSION


def test_the_worker_extension_is_there() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    extension = resolve_obj_by_qualname(arguments.WORKER_EXTENSION)
    for method in (
        *("lorahost_report", "lorahost_wrapped_modules", "lorahost_adapter_modules"),
        *("lorahost_prepare_adapter", "lorahost_prepare_poll", "lorahost_discard_prepared"),
    ):
        assert callable(getattr(extension, method))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-model-len", "many"], "'many'"),
        (["--max-lora-rank", "7"], "invalid choice: 7"),
        (["--max-loras"], "expected one argument"),
        (["--speculative-config", "{broken"], "{broken"),
        (["--dtype", "weird"], "choose from"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
        (["--reasoning-parser", "nosuch"], "'nosuch' is none of"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "nosuch"], "nosuch"),
        (["--chat-template", "/no/such/template"], "/no/such/template"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--help"], "--help"),
    ],
)
def test_what_vllm_refuses_is_said_in_its_words(
    tokens: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError, match="vLLM refuses its arguments") as refused:
        parse(["--model", "m", *tokens])
    assert words in refused.value.message
    assert not refused.value.message.endswith('"')
    assert refused.value.code == "engine_arguments"
    assert "usage:" not in capfd.readouterr().out


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A file that registers a tool parser, of a name that no other test has registered."""
    name = f"p{abs(hash(request.node.name))}"
    lines = ("from vllm.tool_parsers import ToolParser, ToolParserManager",
             f"@ToolParserManager.register_module({name!r})", "class Own(ToolParser):", "    pass")  # fmt: skip
    file = tmp_path / f"{name}.py"
    file.write_text("\n".join(lines))
    return name, file


def test_a_tool_parser_of_the_users_own_is_loaded(plugin: tuple[str, Path]) -> None:
    """As vLLM's server does before it starts its engine, which is none of ours."""
    name, file = plugin
    asked = ["--model", "m", "--enable-auto-tool-choice", "--tool-call-parser", name]
    with pytest.raises(InvalidRequestError, match=f"invalid tool call parser: {name}"):
        parse(asked)
    assert parse([*asked, "--tool-parser-plugin", str(file)]).tool_call_parser == name


def test_the_environment_is_set_where_it_is_open(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_STREAM", "HF_HUB_OFFLINE"):
        environ.setenv(name, "to be undone")
        environ.delenv(name)
    environ.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    environ.setenv("SAGEMAKER_SAFE_PORT_RANGE", "21000-21255")
    for name in ("VLLM_PORT", "VLLM_HOST_IP"):
        environ.setenv(name, "to be undone")
        environ.delenv(name)
    prepare_environment("org/hub-id")
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert (os.environ["VLLM_PORT"], os.environ["VLLM_HOST_IP"]) == ("21000", "127.0.0.1")
    assert "HF_HUB_OFFLINE" not in os.environ
    prepare_environment(str(tmp_path))
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_graphs_compiled_with_other_kernels_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAHOST_KERNELS", "off")
    assert json.loads(flag_value(line(), "--additional-config") or "") == {**COMPILE_KEY, "kernels": "off"}


@pytest.mark.parametrize(
    ("compiler", "gpu", "disabled"), [(True, False, False), (False, False, True), (False, True, False)]
)
def test_without_a_compiler_nothing_is_compiled_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: bool, gpu: bool, disabled: bool
) -> None:
    # the process's own environment is what is written to
    monkeypatch.setattr(arguments.os, "environ", {"PATH": str(tmp_path)})
    monkeypatch.setattr(arguments, "NVIDIA", tmp_path if gpu else tmp_path / "none")
    if compiler:
        (tmp_path / "g++").write_text("")
        (tmp_path / "g++").chmod(0o755)
    prepare_environment("org/hub-id")
    assert (os.environ.get("TORCHDYNAMO_DISABLE") == "1") == disabled
