"""From settings to vLLM's own parsed arguments: vLLM's parser is the judge of every flag."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lorahost
from lorahost import server_flags
from lorahost.adapters import chat_template
from lorahost.environment import flag_value
from lorahost.errors import InvalidRequestError

log = logging.getLogger(__name__)
NVIDIA = Path("/dev/nvidiactl")
WORKER_EXTENSION = "lorahost_kernels.vllm_026.worker.WorkerExtension"


@dataclass(frozen=True, slots=True)
class LoraDefaults:
    """What the host fills in where the user set no flag."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    target_modules: tuple[str, ...] = ()


def _flag_names(tokens: Sequence[str]) -> set[str]:
    return {t.split("=", 1)[0] for t in tokens if t.startswith("--")}


def _given_count(tokens: Sequence[str], flag: str, default: int) -> int:
    value = flag_value(tokens, flag) or ""
    return int(value) if value.isdecimal() and int(value) > 0 else default


def with_defaults(tokens: Sequence[str], *, model: str, base_name: str, lora: LoraDefaults | None) -> list[str]:
    """The full command line: the user's tokens, then what they left open.

    Args:
        tokens: `--flag value` tokens, as the user gave them.
        model: Directory or hub id of the base model.
        base_name: The base model's public name.
        lora: Defaults for the LoRA flags, or None to serve the base model alone. They give way to the user's
            flags: vLLM wants `max_cpu_loras >= max_loras`.
    """
    given = _flag_names(tokens)
    line = ["--model", model, *tokens, *fallback_chat_template(model, tokens)]
    if "--served-model-name" not in given:
        line += ["--served-model-name", base_name]
    if lora is None:
        return line
    line += [] if "--enable-lora" in given else ["--enable-lora"]
    for flag, value in (
        ("--max-loras", min(lora.max_loras, _given_count(tokens, "--max-cpu-loras", lora.max_loras))),
        ("--max-lora-rank", lora.max_lora_rank),
        ("--max-cpu-loras", max(lora.max_cpu_loras, _given_count(tokens, "--max-loras", 1))),
    ):
        if flag not in given:
            line += [flag, str(value)]
    if lora.target_modules and "--lora-target-modules" not in given:
        # what no adapter can be on (embeddings, the LM head) is left unwrapped: it would cost memory and launches
        line += ["--lora-target-modules", *lora.target_modules]
    line += ["--worker-extension-cls", WORKER_EXTENSION]
    if "--additional-config" not in given:
        # part of vLLM's compile-cache key: graphs compiled with other kernels are not reused
        key = {"lorahost": lorahost.__version__, "kernels": os.environ.get("LORAHOST_KERNELS", "on")}
        line += ["--additional-config", json.dumps(key)]
    return line


def parse(line: Sequence[str]) -> argparse.Namespace:
    """Parses with vLLM's own server parser, and loads the parser plugins that the line names.

    Raises:
        InvalidRequestError: an unknown flag or a bad value; the message is vLLM's. Or a flag of vLLM's own HTTP server
            whose promise would be broken.
    """
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refused(message: object) -> InvalidRequestError:
        return InvalidRequestError(f"vLLM refuses its arguments: {message}", code="engine_arguments")

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise refused(message)

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise refused(message or "a flag that only prints, as --help does")

    parser: Any = make_arg_parser(Parser())
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args: argparse.Namespace = parser.parse_args(list(line))
        validate_parsed_serve_args(args)
        # a plugin may print
        with contextlib.redirect_stdout(sys.stderr):
            _load_parsers(args)
    except KeyError as error:
        raise refused(error.args[0] if error.args else error) from error
    except (TypeError, ValueError, OSError) as error:
        raise refused(error) from error
    defaults = {field: parser.get_default(field) for field in server_flags.REFUSED}
    if broken := server_flags.hidden(args, defaults):
        raise InvalidRequestError(f"{server_flags.NOT_HERE}: {'; '.join(broken)}", code="server_flag")
    return args


def _load_parsers(args: argparse.Namespace) -> None:
    """What vLLM's server does before it opens its socket: plugins first, then the names of parsers are checked."""
    from vllm.entrypoints.openai.api_server import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    known = ReasoningParserManager.list_registered()
    if args.reasoning_parser and args.reasoning_parser not in known:
        raise ValueError(f"reasoning parser {args.reasoning_parser!r} is none of {', '.join(sorted(known))}")
    validate_api_server_args(args)


def prepare_environment(model: str) -> None:
    """What vLLM reads from the environment when it is imported, where the user left it open."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # standard output is the host's, one JSON object a line
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if not shutil.which(os.environ.get("CXX", "g++")) and not NVIDIA.exists():
        log.warning("no C++ compiler: what vLLM compiles for the CPU even in eager mode runs uncompiled")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if ports := os.environ.get("SAGEMAKER_SAFE_PORT_RANGE"):
        os.environ.setdefault("VLLM_PORT", ports.partition("-")[0])
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def fallback_chat_template(model: str, tokens: Sequence[str]) -> list[str]:
    """`--chat-template` from the variable CHAT_TEMPLATE, for a base model that has none of its own."""
    template = os.environ.get("CHAT_TEMPLATE", "")
    if not template or "--chat-template" in _flag_names(tokens) or chat_template.read(Path(model)) is not None:
        return []
    return ["--chat-template", template]
