"""Puts the parts together: from settings to a host that can be started."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from lorahost import start_log
from lorahost.adapters import chat_template
from lorahost.adapters.fetch import SourceFetcher
from lorahost.adapters.import_process import import_in_process
from lorahost.adapters.importer import ImportLimits, digest_of
from lorahost.adapters.layout import ModelLayout
from lorahost.adapters.preparation import AdapterTools
from lorahost.adapters.registry import AdapterRegistry, RegistrySettings
from lorahost.adapters.residency import EngineLimits
from lorahost.adapters.s3 import S3Settings
from lorahost.adapters.source_files import SourceLimits
from lorahost.adapters.tensors import Dtype
from lorahost.adapters.versions import ImportReport
from lorahost.core import EngineHost, EngineInfo
from lorahost.engine.fake import FakeHost, import_plain
from lorahost.errors import HostError, InvalidRequestError
from lorahost.host import Host
from lorahost.metrics import Metrics
from lorahost.observe import RegistryObserver
from lorahost.settings import MODEL_DIR, ModelChoice, Settings, engine_flags, load_settings

log = logging.getLogger(__name__)
ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar")


def build(environ: Mapping[str, str] | None = None) -> Host:
    """A host as the environment describes it; nothing is started yet.

    Raises:
        InvalidRequestError: a bad setting, or no base model.
    """
    environ = os.environ if environ is None else environ
    settings = load_settings(environ)
    flags = engine_flags(environ)
    log.info("settings", extra=start_log.shown_environment(settings, flags))
    for warning in start_log.warnings(settings, flags):
        log.warning(warning)
    if settings.engine == "fake":
        choice_model, base_name = environ.get("SM_VLLM_MODEL", ""), settings.base_name or "base"
    else:
        choice = ModelChoice(environ)
        choice_model, base_name = choice.model, settings.base_name or choice.name
        log.info("base model %s from %s", choice.model, choice.source)
    plan = _Plan(settings, choice_model, base_name, flags.tokens)
    return plan.host()


class _Plan:
    """What the factories share."""

    def __init__(self, settings: Settings, model: str, base_name: str, tokens: tuple[str, ...]) -> None:
        self._settings = settings
        self._model = model
        self._base_name = base_name
        self._tokens = tokens
        self._layout: ModelLayout | None = None
        self._metrics = Metrics(settings.metric_adapters)

    def host(self) -> Host:
        return Host(self._settings, self._engine, self._registry, boot=self._boot, metrics=self._metrics)

    def _engine(self) -> EngineHost:
        """Runs on the loop's thread: vLLM's imports take seconds."""
        if self._settings.engine == "fake":
            return FakeHost(base_name=self._base_name, max_cpu_loras=self._settings.max_adapters + 1)
        from lorahost.engine.vllm_026.plan import adapter_plan

        plan = adapter_plan(self._settings, self._model, self._tokens)
        if plan is not None:
            self._layout = plan.layout
            log.info("adapter capacity", extra=plan.facts())
            if plan.warning:
                log.warning(plan.warning)
        from lorahost.engine.vllm_026.host import VllmHost

        lora = None if plan is None else plan.lora
        return VllmHost(model=self._model, base_name=self._base_name, tokens=self._tokens, lora=lora)

    def _registry(self, engine: EngineHost, info: EngineInfo) -> AdapterRegistry:
        settings = self._settings
        self._compare_modules(info)
        limits = EngineLimits(max(1, info.max_loras), max(1, info.max_cpu_loras))
        return AdapterRegistry(
            engine,
            self._tools(info),
            RegistrySettings(
                work_dir=settings.work_dir,
                max_adapters=min(settings.max_adapters, limits.first_loads),
                limits=limits,
                probe=settings.probe,
                reserved=frozenset({info.base_name}),
            ),
            on_event=RegistryObserver(self._metrics),
        )

    def _compare_modules(self, info: EngineInfo) -> None:
        """The importer's table against the engine's own: what differs can't be served, so it is said at once."""
        if self._layout is None:
            return
        ours = self._layout.module_ids
        if missing := sorted(ours - info.lora_modules):
            log.warning(
                "the engine has no LoRA on %d modules of this architecture", len(missing), extra={"first": missing[:4]}
            )
        if extra := sorted(info.lora_modules - ours):
            log.info(
                "modules that the importer knows no checkpoint name for",
                extra={"count": len(extra), "first": extra[:4]},
            )

    def _tools(self, info: EngineInfo) -> AdapterTools:
        settings = self._settings
        fetcher = SourceFetcher(
            roots=tuple(settings.adapter_roots),
            limits=SourceLimits(max_bytes=int(settings.adapter_max_mb * 2**20)),
            s3=S3Settings(endpoint_url=settings.s3_endpoint_url),
        )
        if self._layout is None:
            return AdapterTools(fetcher.fetch, digest_of, import_plain)
        layout = self._layout
        limits = ImportLimits(
            max_rank=info.max_lora_rank, max_bytes=int(settings.adapter_max_mb * 2**20), dtype=_dtype(info.lora_dtype)
        )

        def import_(source: Path, target: Path) -> ImportReport:
            work = import_in_process(source, target, layout, limits, timeout_s=settings.adapter_timeout_s)
            report = asyncio.run(work)
            chat_template.carry(source, target)
            return report

        def digest(source: Path) -> str:
            return chat_template.digest_with(digest_of(source), source)

        return AdapterTools(fetcher.fetch, digest, import_)

    async def _boot(self, host: Host) -> None:
        """Registers the adapters beside the model; a bad one is reported and does not stop the start."""
        root = self._settings.adapters_dir or Path(self._model or MODEL_DIR) / "adapters"
        found = _adapters_in(root) if root.is_dir() else {}
        for name, path in found.items():
            try:
                await host.registry.register(name, str(path.resolve()))
            except HostError as error:
                log.error("adapter %s at start: %s", name, error.message, extra={"code": error.code})
        if found:
            log.info("adapters at start", extra={"found": len(found), "root": str(root)})


def _adapters_in(root: Path) -> dict[str, Path]:
    """Directories and archives right below `root` by adapter name; hidden ones are none."""
    found: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        ending = next((e for e in ARCHIVE_ENDINGS if path.name.endswith(e)), "")
        if not path.name.startswith(".") and (path.is_dir() or ending):
            found.setdefault(path.name.removesuffix(ending), path)
    return found


def _dtype(name: str) -> Dtype:
    """The engine's LoRA dtype, as the importer writes it."""
    known: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
    for dtype in known:
        if dtype == name:
            return dtype
    raise InvalidRequestError(f"the engine keeps LoRA weights in {name}; the importer writes {', '.join(known)}")
