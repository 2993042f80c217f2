"""`SM_VLLM_*` and `OPTION_*` variables as vLLM command-line tokens.

`SM_VLLM_MAX_MODEL_LEN=4096` means `--max-model-len 4096`, as in AWS's vLLM image; `OPTION_MAX_LORAS=8` is the name
that LMI users know. Where both are set, `SM_VLLM_*` wins. What the host itself needs to know (`HOST_NAMES`) is read
by `settings`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SM_PREFIX = "SM_VLLM_"
OPTION_PREFIX = "OPTION_"
OPTION_FLAGS = {
    "MAX_LORAS": "max-loras",
    "MAX_LORA_RANK": "max-lora-rank",
    "MAX_CPU_LORAS": "max-cpu-loras",
    "LORA_DTYPE": "lora-dtype",
    "FULLY_SHARDED_LORAS": "fully-sharded-loras",
    "TENSOR_PARALLEL_DEGREE": "tensor-parallel-size",
    "PIPELINE_PARALLEL_DEGREE": "pipeline-parallel-size",
    "MAX_MODEL_LEN": "max-model-len",
    "MAX_ROLLING_BATCH_SIZE": "max-num-seqs",
    "MAX_NUM_SEQS": "max-num-seqs",
    "GPU_MEMORY_UTILIZATION": "gpu-memory-utilization",
    "DTYPE": "dtype",
    "QUANTIZE": "quantization",
    "QUANTIZATION": "quantization",
    "KV_CACHE_DTYPE": "kv-cache-dtype",
    "ENFORCE_EAGER": "enforce-eager",
    "TRUST_REMOTE_CODE": "trust-remote-code",
    "REVISION": "revision",
    "LOAD_FORMAT": "load-format",
    "ENABLE_CHUNKED_PREFILL": "enable-chunked-prefill",
    "ENABLE_PREFIX_CACHING": "enable-prefix-caching",
    "CHAT_TEMPLATE": "chat-template",
    "TOOL_CALL_PARSER": "tool-call-parser",
    "ENABLE_AUTO_TOOL_CHOICE": "enable-auto-tool-choice",
    "REASONING_PARSER": "reasoning-parser",
}
# read by the host itself, not by vLLM
HOST_NAMES = frozenset(
    {"SM_VLLM_MODEL", "SM_VLLM_PORT", "SM_VLLM_HOST", "SM_VLLM_ENABLE_LORA", "OPTION_MODEL_ID", "OPTION_ENABLE_LORA"}
)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """vLLM tokens, where each came from, and variables that mean nothing here."""

    tokens: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def engine_flags(environ: Mapping[str, str]) -> EngineFlags:
    """Translates the environment; unknown `OPTION_*` names are reported, unknown flags are vLLM's to refuse."""
    flags: dict[str, tuple[str, list[str]]] = {}
    unknown: list[str] = []
    for name, value in sorted(environ.items()):
        if not name.startswith(OPTION_PREFIX) or name in HOST_NAMES:
            continue
        flag = OPTION_FLAGS.get(name.removeprefix(OPTION_PREFIX))
        if flag is None:
            unknown.append(name)
        else:
            flags[flag] = (name, tokens(flag, value))
    for name, value in sorted(environ.items()):
        if name.startswith(SM_PREFIX) and name not in HOST_NAMES:
            flag = name.removeprefix(SM_PREFIX).lower().replace("_", "-")
            flags[flag] = (name, tokens(flag, value))
    ordered = sorted(flags.items())
    return EngineFlags(
        tokens=tuple(token for _, (_, parts) in ordered for token in parts),
        sources={f"--{flag}": name for flag, (name, _) in ordered},
        unknown=tuple(unknown),
    )


def flag_value(tokens: Sequence[str], flag: str) -> str | None:
    """What follows `--flag` in a command line; None where the flag is absent or bare."""
    return next(iter(flag_values(tokens, flag)), None)


def flag_values(tokens: Sequence[str], flag: str) -> tuple[str, ...]:
    """All that follows `--flag` up to the next flag; empty where it is absent or bare."""
    behind = tokens[tokens.index(flag) + 1 :] if flag in tokens else ()
    return tuple(itertools.takewhile(lambda value: not value.startswith("--"), behind))


def flag_number(tokens: Sequence[str], flag: str) -> int:
    """The number behind `--flag`; 1 where the flag is absent, or has a value that is vLLM's to refuse."""
    value = flag_value(tokens, flag) or ""
    return int(value) if value.isdecimal() and int(value) > 0 else 1


def shards(tokens: Sequence[str]) -> int:
    """GPUs that the base model's weights are spread over."""
    return flag_number(tokens, "--tensor-parallel-size") * flag_number(tokens, "--pipeline-parallel-size")


def tokens(flag: str, value: str) -> list[str]:
    """One variable as tokens: true and empty are a bare flag, false is none, JSON lists are spread."""
    name = f"--{flag}"
    if value.lower() == "true" or value == "":
        return [name]
    if value.lower() == "false":
        return []
    parsed = _json(value)
    if isinstance(parsed, list):
        return [name, *(item if isinstance(item, str) else json.dumps(item) for item in parsed)] if parsed else []
    objects = _json_objects(value)
    return [name, *objects] if len(objects) > 1 else [name, value]


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return None


def _json_objects(value: str) -> list[str]:
    """Splits a run of JSON objects (`{...} {...}`); anything else is no run."""
    decoder, rest, objects = json.JSONDecoder(), value.strip(), []
    while rest.startswith("{"):
        try:
            _, end = decoder.raw_decode(rest)
        except json.JSONDecodeError:
            return []
        objects.append(rest[:end])
        rest = rest[end:].strip()
    return [] if rest else objects
