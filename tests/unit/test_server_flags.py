"""vLLM's flags of its own server: none is unknown to us, and none breaks its promise unsaid."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lorahost import doctor, start_log
from lorahost.engine.vllm_026.arguments import parse
from lorahost.environment import OPTION_FLAGS, engine_flags
from lorahost.errors import InvalidRequestError
from lorahost.server_flags import IGNORED, REFUSED, USED
from lorahost.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
# what sets variables for a server; SM_VLLM_ names there must mean something to it
SETTERS = ("Dockerfile", "buildspec.yml", "container", "deploy", "examples")
# read by this package, not by what vLLM's server makes of its arguments
OURS = {"host", "port", "config", "tool_parser_plugin"}


def frontend_fields() -> set[str]:
    """Fields of `FrontendArgs`, and what vLLM's server parser adds to them beside the engine's."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import FrontendArgs, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    added = {action.dest for action in parser._actions} - set(AsyncEngineArgs.__dataclass_fields__)
    return (set(FrontendArgs.__dataclass_fields__) | added) - {"help", "model_tag"}


def test_every_flag_of_vllms_server_is_in_the_table_once() -> None:
    assert frontend_fields() == USED | IGNORED | set(REFUSED)
    assert not USED & IGNORED
    assert not (USED | IGNORED) & set(REFUSED)


def test_what_counts_as_used_is_read_by_the_part_of_vllms_server_that_runs_here() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.generate.api_router import init_generate_state
    from vllm.entrypoints.openai.api_server import init_app_state

    source = inspect.getsource(init_app_state) + inspect.getsource(init_generate_state)
    names = set(re.findall(r"\bargs\.(\w+)", source)) | set(re.findall(r'getattr\(args, "(\w+)"', source))
    assert names >= USED - OURS
    assert not (names & IGNORED) - {"enable_server_load_tracking", "tool_server"}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_promise_that_would_be_broken_stops_the_start(field: str) -> None:
    variable = f"SM_VLLM_{field.upper()}"
    with pytest.raises(InvalidRequestError) as refused:
        load_settings({variable: "hidden-value"})
    assert refused.value.code == "server_flag"
    assert f"{variable}: {REFUSED[field]}" in refused.value.message
    assert "hidden-value" not in refused.value.message
    assert load_settings({variable: "false"}) == load_settings({})


def test_vllms_own_variable_for_keys_is_one_of_them() -> None:
    with pytest.raises(InvalidRequestError, match="VLLM_API_KEY"):
        load_settings({"VLLM_API_KEY": "k"})
    assert load_settings({"VLLM_API_KEY": ""}) == load_settings({})


def test_all_broken_promises_are_named_at_once_and_doctor_says_the_same() -> None:
    environ = {"SM_VLLM_API_KEY": "k", "SM_VLLM_UDS": "/run/s"}
    with pytest.raises(InvalidRequestError, match=r"SM_VLLM_API_KEY.*SM_VLLM_UDS") as refused:
        load_settings(environ)
    report = doctor.report(environ)
    assert report["ok"] is False
    assert [check["message"] for check in report["checks"]] == [refused.value.message]


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_a_flag_without_effect_is_a_warning(field: str) -> None:
    environ = {f"SM_VLLM_{field.upper()}": "1"}
    [warning] = start_log.warnings(load_settings(environ), engine_flags(environ))
    assert warning.startswith(f"SM_VLLM_{field.upper()} has no effect")


def test_what_means_something_is_no_warning() -> None:
    environ = {f"SM_VLLM_{field.upper()}": "1" for field in USED} | {"SM_VLLM_MAX_MODEL_LEN": "8"}
    assert start_log.warnings(load_settings(environ), engine_flags(environ)) == []


@pytest.mark.parametrize("line", [["--config", "FILE"], ["--api-ke", "k"], ["--ssl-keyf=k"]])
def test_a_promise_that_no_variable_names_is_refused_all_the_same(line: list[str], tmp_path: Path) -> None:
    """In a file of `--config`, or shortened, as vLLM's parser takes it."""
    pytest.importorskip("vllm")
    file = tmp_path / "config.yaml"
    file.write_text("api-key: k\n")
    with pytest.raises(InvalidRequestError, match=r"--(api-key|ssl-keyfile): no "):
        parse(["--model", "m", *(str(file) if part == "FILE" else part for part in line)])


def test_defaults_of_vllms_parser_are_no_promises() -> None:
    pytest.importorskip("vllm")
    args: Any = parse(["--model", "m"])
    assert args.api_key is None


def test_nothing_that_sets_variables_for_a_server_sets_these() -> None:
    files = [file for name in SETTERS for file in [ROOT / name, *(ROOT / name).rglob("*")] if file.is_file()]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".yaml", ".yml", ".sh", ".md", ".ipynb", "")]
    named = {name.lower() for text in texts for name in re.findall(r"\bSM_VLLM_(\w+)", text)}
    assert "enforce_eager" in named
    assert not named & (IGNORED | set(REFUSED))
    assert not {flag.replace("-", "_") for flag in OPTION_FLAGS.values()} & (IGNORED | set(REFUSED))
