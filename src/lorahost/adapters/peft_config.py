"""adapter_config.json as PEFT writes it: what the importer needs, and what must be refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from lorahost.errors import AdapterRejectedError

MAX_CONFIG_BYTES = 4 << 20

# Initialisations that subtract the start value from the base weights, so the adapter alone isn't the change.
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Settings that only matter while training, or that this importer reads.
_HARMLESS = {
    "use_rslora",
    "use_dora",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "megatron_config",
}


class PeftConfig(BaseModel):
    """The LoRA fields of adapter_config.json. Unknown fields are kept, so that unknown variants can be refused."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str
    r: PositiveInt
    lora_alpha: float = Field(allow_inf_nan=False)
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    layer_replication: list[Any] | None = None
    alora_invocation_tokens: list[int] | None = None
    megatron_config: dict[str, Any] | None = None
    peft_version: str | None = None

    @classmethod
    def read(cls, path: Path) -> PeftConfig:
        """Parses and checks the file.

        Raises:
            AdapterRejectedError: not JSON, a field of the wrong type, or a feature that can't be served.
        """
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise AdapterRejectedError(
                f"adapter_config.json has {size} bytes, the limit is {MAX_CONFIG_BYTES}", code="invalid_config"
            )
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as e:
            raise AdapterRejectedError(f"adapter_config.json is not JSON: {e}", code="invalid_config") from e
        if not isinstance(data, dict):
            raise AdapterRejectedError("adapter_config.json is not a JSON object", code="invalid_config")
        for name in ("rank_pattern", "alpha_pattern"):
            if data.get(name, 0) is None:
                del data[name]
        peft_type = data.get("peft_type")
        if peft_type != "LORA":
            raise AdapterRejectedError(
                f"adapter_config.json: peft_type is {peft_type!r}; only 'LORA' can be served",
                code="unsupported_peft_type",
            )
        try:
            config = cls.model_validate(data)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise AdapterRejectedError(
                f"adapter_config.json: {where}: {first['msg']}, got {first['input']!r:.200}",
                code="invalid_config",
                param=where,
            ) from e
        config.check()
        return config

    def check(self) -> None:
        """Refuses every feature whose effect would be lost or changed.

        Raises:
            AdapterRejectedError: with the field, its value and what is supported.
        """
        for refused, field, code, supported in (
            (self.use_dora, "use_dora", "dora_unsupported", "false"),
            (self.bias != "none", "bias", "bias_unsupported", "'none'"),
            (self.lora_bias, "lora_bias", "bias_unsupported", "false"),
            (bool(self.modules_to_save), "modules_to_save", "modules_to_save_unsupported", "null"),
            (self.fan_in_fan_out, "fan_in_fan_out", "fan_in_fan_out_unsupported", "false"),
            (self.trainable_token_indices, "trainable_token_indices", "trainable_tokens_unsupported", "null"),
            (self.layer_replication, "layer_replication", "layer_replication_unsupported", "null"),
            (self.alora_invocation_tokens, "alora_invocation_tokens", "alora_unsupported", "null"),
            (self.megatron_config, "megatron_config", "megatron_unsupported", "null"),
        ):
            if refused:
                raise _unsupported(field, getattr(self, field), code, supported)
        init = self.init_lora_weights
        if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
            raise AdapterRejectedError(
                f"adapter_config.json: init_lora_weights is {init!r}, which changes the base weights too; "
                "save the adapter with path_initial_model_for_weight_conversion, so that it stands alone",
                code="base_changing_init",
            )
        for field, value in (self.model_extra or {}).items():
            is_variant = field.startswith("use_") or field.endswith("_config")
            if is_variant and field not in _HARMLESS and value not in (None, False, {}, []):
                raise _unsupported(field, value, "unsupported_variant", "plain LoRA")
        for field in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, field):
                _compile(field, pattern)

    def scales(self) -> ScaleRules:
        return ScaleRules(self)


class ScaleRules:
    """The scale that PEFT applies to B·A of a module, with PEFT's own reading of the patterns."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        self._rank = [(_compile("rank_pattern", p), p, r) for p, r in config.rank_pattern.items()]
        self._alpha = [(_compile("alpha_pattern", p), p, a) for p, a in config.alpha_pattern.items()]
        self._parameters = [f".{p}" for p in config.target_parameters or []]
        self._unmatched = {("rank_pattern", p) for p in config.rank_pattern}
        self._unmatched |= {("alpha_pattern", p) for p in config.alpha_pattern}

    def scale(self, module: str, rank: int, *, parameter: str | None = None) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA.

        Args:
            module: Path of the module in the checkpoint's own naming.
            rank: Rank of its tensors.
            parameter: Name of the parameter, where PEFT adapted a bare parameter of the module.

        Raises:
            AdapterRejectedError: the config gives the module another rank than its tensors have.
        """
        key = module
        if parameter is not None:
            key = f"{module}.{parameter}"
        elif any(f".{module}.weight".endswith(p) for p in self._parameters):
            key = f"{module}.weight"
        declared = self._lookup(self._rank, key, "rank_pattern", self._config.r)
        alpha = self._lookup(self._alpha, key, "alpha_pattern", self._config.lora_alpha)
        if declared != rank:
            raise AdapterRejectedError(
                f"{key}: its tensors have rank {rank}, but adapter_config.json says {declared} "
                "(r, rank_pattern), so its scale alpha/r is uncertain",
                code="rank_mismatch",
                status=400,
                details={"module": key, "rank": rank, "declared_rank": int(declared)},
            )
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def formula(self) -> Literal["alpha/r", "alpha/sqrt(r)"]:
        return "alpha/sqrt(r)" if self._config.use_rslora else "alpha/r"

    def unmatched(self) -> list[str]:
        """Pattern entries that no module has matched so far."""
        return sorted(f"{field}[{pattern!r}]" for field, pattern in self._unmatched)

    def _lookup(self, rules: list[tuple[re.Pattern[str], str, Any]], key: str, field: str, default: float) -> float:
        for compiled, pattern, value in rules:
            if compiled.match(key):
                self._unmatched.discard((field, pattern))
                return float(value)
        return default


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    """PEFT's rule: the pattern is a regex that must match a whole dotted tail of the module's path."""
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as e:
        raise AdapterRejectedError(
            f"adapter_config.json: {field} has {pattern!r}, which is not a regular expression: {e}",
            code="invalid_config",
        ) from e


def _unsupported(field: str, value: object, code: str, supported: str) -> AdapterRejectedError:
    return AdapterRejectedError(
        f"adapter_config.json: {field} is {value!r:.200}; only {supported} can be served",
        code=code,
        param=field,
    )
