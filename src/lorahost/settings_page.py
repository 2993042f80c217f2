"""`docs/settings.md` and `lorahost doctor --settings`: each setting's variables, values, default, meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from lorahost.server_flags import IGNORED, KEY_VARIABLE, REFUSED
from lorahost.settings import Settings, known_variables


def table() -> str:
    """For the terminal."""
    lines = []
    for variables, field in _settings():
        about = [f"Values: {allowed}." if (allowed := values(field)) else "", f"Default: {default(field) or 'none'}."]
        lines.append(f"{', '.join(variables)}\n    {field.description} {' '.join(filter(None, about))}")
    return "\n".join(lines).replace("`", "")


def page() -> str:
    """The Markdown page: the same, and the variables that are not `LORAHOST_*`."""
    rows = [
        f"| {', '.join(f'`{v}`' for v in variables)} | {values(field)} | {default(field)} | {field.description} |"
        for variables, field in _settings()
    ]
    advice: dict[str, list[str]] = {}
    for field_name, instead in REFUSED.items():
        advice.setdefault(instead, []).append(f"`{_flag(field_name)}`")
    refused = [f"| {', '.join(flags)} | {instead} |" for instead, flags in advice.items()]
    ignored = ", ".join(f"`{_flag(name)}`" for name in sorted(IGNORED))
    return PAGE.format(rows="\n".join(rows), refused="\n".join(refused), ignored=ignored, key=KEY_VARIABLE)


def values(field: FieldInfo) -> str:
    """What a setting may be, where that is more than its type says: names, or bounds."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{name}`" for name in get_args(field.annotation))
    if field.annotation is bool:
        return "`true`, `false`"
    bounds = []
    for bound in field.metadata:
        if isinstance(bound, Ge):
            bounds.append(f"at least {bound.ge}")
        elif isinstance(bound, Gt):
            bounds.append(f"above {bound.gt}")
        elif isinstance(bound, Le):
            bounds.append(f"at most {bound.le}")
    return ", ".join(bounds)


def default(field: FieldInfo) -> str:
    """As it would be written in the environment; empty where it is nothing, or worked out."""
    extra: Any = field.json_schema_extra or {}
    found = extra.get("default", "" if field.default_factory is not None else field.get_default())
    text = f"{found:g}" if isinstance(found, float) else str(found).lower() if isinstance(found, bool) else str(found)
    return "" if found in ("", None) else f"`{text}`"


def _settings() -> Iterator[tuple[list[str], FieldInfo]]:
    variables: dict[str, list[str]] = {}
    for variable, name in known_variables().items():
        variables.setdefault(name, []).append(variable)
    for name, field in Settings.model_fields.items():
        yield variables[name], field


def _flag(field: str) -> str:
    return f"SM_VLLM_{field.upper()}"


PAGE = """# Settings

Made by `lorahost doctor --settings-page`. A misspelt `LORAHOST_*` name stops the start, and so does a value that is not
allowed.

| variable | values | default | meaning |
| --- | --- | --- | --- |
{rows}

## Read under their own names

| variable | meaning |
| --- | --- |
| `SM_VLLM_<FLAG>` | vLLM's flag `--<flag>`: `true` or empty is a bare flag, `false` none, a JSON list its elements; \
vLLM refuses what it does not know |
| `OPTION_<NAME>` | LMI's names (`ENABLE_LORA`, `MAX_LORAS`, `TENSOR_PARALLEL_DEGREE`, ...); `SM_VLLM_*` wins; an \
unknown one is ignored with a warning |
| `SM_VLLM_MODEL`, `/opt/ml/model`, `OPTION_MODEL_ID`, `HF_MODEL_ID` | the base model; the first of them that is there |
| `CHAT_TEMPLATE` | chat template for a base model that has none |
| `SAGEMAKER_SAFE_PORT_RANGE` | ports for the engine's internal listeners |
| `VLLM_CPU_KVCACHE_SPACE` | GiB of KV cache of the CPU engine, 1 by default |
| `LORAHOST_URL` | the server that `lorahost adapters add`, `ls` and `rm` talk to, `http://localhost:8080` by default; \
the server itself does not read it |

## Flags of vLLM's own server

HTTP is this server's own, so flags of vLLM's can't do what they say. These stop the start:

| variable | instead |
| --- | --- |
{refused}
| `{key}` | as `SM_VLLM_API_KEY` |

These are ignored with a warning: {ignored}.
"""
