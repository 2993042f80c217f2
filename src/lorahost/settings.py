"""All settings of the host, read once from the environment.

Own settings are `LORAHOST_*`; vLLM's are `SM_VLLM_*` and `OPTION_*` (see `environment`); SageMaker's own variables are
read under their own names. A misspelt `LORAHOST_*` name stops the start.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lorahost import server_flags
from lorahost.environment import EngineFlags, engine_flags
from lorahost.errors import InvalidRequestError
from lorahost.transcript import MAX_CHARS

PREFIX = "LORAHOST_"
MODEL_DIR = Path("/opt/ml/model")
# read by the command line's client, not by the server
CLIENT_VARIABLES = frozenset({"LORAHOST_URL"})


class Settings(BaseSettings):
    """One field per setting; the variable is `LORAHOST_` and the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = Field(
        "0.0.0.0",
        validation_alias=AliasChoices("LORAHOST_HOST", "SM_VLLM_HOST"),
        description="Address to listen on.",
    )
    port: int = Field(
        8080,
        ge=1,
        le=65535,
        validation_alias=AliasChoices("LORAHOST_PORT", "SAGEMAKER_BIND_TO_PORT", "SM_VLLM_PORT"),
        description="Port to listen on.",
    )
    base_name: str = Field("", description="Public name of the base model; by default the model folder's name.")
    engine: Literal["vllm", "fake"] = Field(
        "vllm", description="`fake` answers without a model, for trying the HTTP side."
    )
    lora: bool = Field(
        True,
        validation_alias=AliasChoices("LORAHOST_LORA", "SM_VLLM_ENABLE_LORA", "OPTION_ENABLE_LORA"),
        description="Serve adapters; false serves the base model alone.",
    )
    kernels: Literal["on", "off"] = Field(
        "on", description="On a GPU: LoRA products by this package's kernels, or by vLLM's own."
    )
    # the next three are checked here and read by the kernels, in vLLM's processes, from the environment
    skip_untouched: Literal["on", "off"] = Field(
        "on",
        description="On a GPU: no launches for modules that no resident adapter has weights for; unset, `off` with "
        "several GPUs or speculative decoding.",
    )
    busy_first: Literal["on", "off"] = Field(
        "on",
        description="On a GPU, MXFP4 experts: programs with work come first in the second base GEMM of small batches.",
    )
    config_dir: Path | None = Field(None, description="Folder of tuned configurations instead of the packaged one.")
    max_lora_rank: int = Field(
        32,
        ge=1,
        le=256,
        description="Largest adapter rank, rounded up to 1, 8, 16, 32, 64, 128 or 256; `SM_VLLM_MAX_LORA_RANK` wins.",
    )
    max_adapters: int = Field(
        64,
        ge=1,
        description="Adapters that may be registered at once; fewer where the engine's copies of them would take more "
        "than half of the host's free memory.",
    )
    max_slots: int = Field(
        16,
        ge=1,
        description="Most slots. There are as many as fit into a fifth of what the base model's weights leave of 90 % "
        "of the GPU's memory, at least one; `SM_VLLM_MAX_LORAS` sets their number itself.",
    )

    max_running: int = Field(256, ge=1, description="Requests in the engine at once.")
    max_queued: int = Field(256, ge=0, description="Requests that may wait for admission; one more gets 429.")
    max_sequences: int = Field(128, ge=1, description="Sequences of one request, prompts times `n`.")
    spare_threads: int = Field(64, ge=8, description="HTTP threads kept beyond running and queued requests.")
    max_body_mb: float = Field(
        32.0, gt=0, description="Largest request body in MiB, `/adapters` aside, where it is 1; a longer one gets 413."
    )
    client_stall_s: float = Field(60.0, gt=0, description="Seconds a client may stop reading its stream.")

    adapters_dir: Path | None = Field(
        None, description="Folder of adapters registered at start; by default `adapters` in the model's folder."
    )
    adapter_roots: list[Path] = Field(
        default_factory=list,
        description="Local adapter sources must lie under one of these folders, separated by `:`; empty allows all.",
    )
    adapter_max_mb: float = Field(16384.0, gt=0, description="Largest adapter in MiB, unpacked.")
    adapter_timeout_s: float = Field(
        900.0, gt=0, description="Seconds that importing one adapter may take once it is fetched."
    )
    probe: Literal["off", "warn", "refuse"] = Field(
        "warn", description="What an adapter without effect on the probe prompt means."
    )
    s3_endpoint_url: str = Field("", description="Another S3 endpoint, for tests and private stores.")
    work_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / "lorahost",
        json_schema_extra={"default": "${TMPDIR:-/tmp}/lorahost"},
        description="Where normalised adapters live.",
    )

    lmi_max_new_tokens: int = Field(30, ge=1, description="`max_new_tokens` of LMI bodies that give none.")
    tgi_compat: bool = Field(False, description="LMI answers as TGI's list form.")
    unknown_model: Literal["error", "base"] = Field(
        "error", description="What an unknown `model` on /invocations means."
    )
    bedrock: Literal["auto", "on", "off"] = Field(
        "auto", description="Bedrock's runtime API on `/model/`; `auto` is on, but off under SageMaker."
    )
    sessions: bool = Field(
        False,
        validation_alias=AliasChoices("LORAHOST_SESSIONS", "SAGEMAKER_ENABLE_STATEFUL_SESSIONS"),
        description="Sticky sessions.",
    )
    session_ttl_s: int = Field(
        1200,
        ge=1,
        validation_alias=AliasChoices("LORAHOST_SESSION_TTL_S", "SAGEMAKER_SESSIONS_EXPIRATION"),
        description="Seconds from its creation after which a session expires; use does not extend it.",
    )

    drain_s: float = Field(20.0, ge=0, le=25, description="Seconds that running requests get after SIGTERM.")
    stall_s: float = Field(
        120.0, gt=0, description="Seconds without token progress after which the engine counts as hung."
    )
    exit_grace_s: float = Field(10.0, ge=0, description="Seconds between an unhealthy engine and the exit.")
    start_timeout_s: float = Field(3600.0, gt=0, description="Seconds that the engine may take to start.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the host's log.")
    log_prompts: bool = Field(
        False,
        description=f"Put prompt and answer into each request's log line, at most {MAX_CHARS} characters of each.",
    )
    metric_adapters: int = Field(
        100, ge=1, description="Adapters with a metric label of their own; the rest is `other`."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_settings` passes: it knows the aliases and refuses unknown names."""
        return (init_settings,)

    @property
    def threads(self) -> int:
        """HTTP threads: each running or queued request holds one."""
        return self.max_running + self.max_queued + self.spare_threads


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings.

    Raises:
        InvalidRequestError: a bad value, an unknown `LORAHOST_*` name, or a flag of vLLM's own HTTP server whose
            promise would be broken; the message names it.
    """
    environ = os.environ if environ is None else environ
    known = known_variables()
    unknown = sorted(n for n in environ if n.startswith(PREFIX) and n not in known and n not in CLIENT_VARIABLES)
    if unknown:
        named = ", ".join(_with_near_match(name, known) for name in unknown)
        raise InvalidRequestError(
            f"unknown settings {named}; `lorahost doctor --settings` lists all",
            code="unknown_setting",
        )
    if broken := server_flags.refusals(environ, engine_flags(environ)):
        raise InvalidRequestError(f"{server_flags.NOT_HERE}: {'; '.join(broken)}", code="server_flag")
    values: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        for variable in _variables(name, field.validation_alias):
            if environ.get(variable, "") != "":
                values[variable if field.validation_alias else name] = environ[variable]
                break
    if isinstance(values.get("adapter_roots"), str):
        values["adapter_roots"] = [p for p in values["adapter_roots"].split(":") if p]
    if values.get("bedrock", "auto") == "auto":
        values["bedrock"] = "off" if under_sagemaker(environ) else "on"
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"{_shown(item['loc'])}={item['input']!r}: {item['msg']}" for item in error.errors())
        raise InvalidRequestError(f"bad settings: {problems}", code="bad_setting") from error


def under_sagemaker(environ: Mapping[str, str], model_dir: Path = MODEL_DIR) -> bool:
    """Whether this is a SageMaker container: its platform sets `SAGEMAKER_*` and puts the model at `/opt/ml/model`.

    Either is enough. A start by hand that looks like one loses `auto` settings, which can be set instead.
    """
    if any(name.startswith("SAGEMAKER_") for name, value in environ.items() if value):
        return True
    return model_dir.is_dir() and any(model_dir.iterdir())


def _with_near_match(name: str, known: Mapping[str, str]) -> str:
    words = [variable.removeprefix(PREFIX) for variable in known if variable.startswith(PREFIX)]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=0.75)
    return f"{name} (did you mean {PREFIX}{near[0]}?)" if near else name


def _shown(location: tuple[int | str, ...]) -> str:
    name = str(location[0])
    return name if name.isupper() else PREFIX + name.upper()


def _variables(name: str, alias: Any) -> list[str]:
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [PREFIX + name.upper()]


def known_variables() -> dict[str, str]:
    """Every variable that `Settings` reads, with its field's name."""
    return {v: name for name, field in Settings.model_fields.items() for v in _variables(name, field.validation_alias)}


class ModelChoice:
    """Which base model, and why: SM_VLLM_MODEL, then /opt/ml/model, then OPTION_MODEL_ID, then HF_MODEL_ID."""

    def __init__(self, environ: Mapping[str, str], model_dir: Path = MODEL_DIR) -> None:
        self.model, self.source = self._choose(environ, model_dir)

    @staticmethod
    def _choose(environ: Mapping[str, str], model_dir: Path) -> tuple[str, str]:
        if model := environ.get("SM_VLLM_MODEL"):
            return model, "SM_VLLM_MODEL"
        if (model_dir / "config.json").is_file():
            return str(model_dir), str(model_dir)
        for name in ("OPTION_MODEL_ID", "HF_MODEL_ID"):
            if model := environ.get(name):
                return model, name
        raise InvalidRequestError(
            f"no base model: set SM_VLLM_MODEL or HF_MODEL_ID, or mount one at {model_dir} (with its config.json)",
            code="no_model",
        )

    @property
    def name(self) -> str:
        """A public name made from the path or hub id."""
        if Path(self.model) == MODEL_DIR:
            return "base"
        return Path(self.model).name or self.model


__all__ = [
    "EngineFlags",
    "ModelChoice",
    "Settings",
    "engine_flags",
    "known_variables",
    "load_settings",
    "under_sagemaker",
]
