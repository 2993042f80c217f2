"""What the engine will start with, worked out before it starts: for the start itself, and for `lorahost doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorahost import capacity
from lorahost.adapters.layout import ModelLayout
from lorahost.core import Json
from lorahost.engine.vllm_026 import arguments
from lorahost.engine.vllm_026.arguments import LoraDefaults
from lorahost.environment import flag_value, flag_values, shards
from lorahost.errors import AdapterRejectedError, InvalidRequestError
from lorahost.settings import Settings


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Where LoRA can go in the base model, and how many adapters fit.

    Attributes:
        layout: The base model's LoRA targets.
        rank: Of a slot.
        fits: Slots and adapters that memory allows.
        wrapped: Modules of the layout that the engine wraps; an adapter on others is refused.
        lora: The flags that the host fills in.
        warning: What may be asked for in vain; empty where nothing is.
    """

    layout: ModelLayout
    rank: int
    fits: capacity.Capacity
    wrapped: frozenset[str]
    lora: LoraDefaults
    warning: str

    def facts(self) -> Json:
        """For the log and `lorahost doctor`."""
        dense = [t for t in self.layout.dense_targets() if t.engine in self.wrapped]
        experts = [t for t in self.layout.expert_targets() if t.engine in self.wrapped]
        return {
            "architecture": self.layout.architecture,
            "max_lora_rank": self.rank,
            "targets": len(dense) + 2 * len(experts),
            **self.fits.facts(),
        }


def adapter_plan(settings: Settings, model: str, tokens: Sequence[str]) -> AdapterPlan | None:
    """The plan for adapters on `model`; None where LoRA is off. Sets what vLLM's import reads from the environment.

    Raises:
        InvalidRequestError: an architecture that is not supported, a config.json that lacks a size, or
            --lora-target-modules with a name that no adapter can be on.
        OSError: config.json can't be read.
    """
    arguments.prepare_environment(model)
    if not settings.lora:
        return None
    from lorahost.engine.vllm_026.device import device_free_bytes
    from lorahost.engine.vllm_026.host import base_config

    try:
        layout = ModelLayout.from_config(base_config(model), internal_router_lora=True)
    except AdapterRejectedError as error:
        raise InvalidRequestError(
            f"{error.message}; LORAHOST_LORA=false serves the base model alone", code=error.code, details=error.details
        ) from error
    rank = capacity.slot_rank(tokens, settings.max_lora_rank)
    wrapped = wrapped_modules(layout, flag_values(tokens, "--lora-target-modules"))
    fits = capacity.work_out(
        capacity.adapter_bytes(layout, rank, wrapped=wrapped.__contains__),
        device_free_bytes=device_free_bytes(Path(model), shards(tokens)),
        host_free_bytes=capacity.host_free_bytes(),
        max_slots=settings.max_slots,
        max_adapters=settings.max_adapters,
    )
    # one more than may be registered: a new version loads beside the one it replaces
    lora = LoraDefaults(fits.slots, fits.adapters + 1, rank, layout.engine_suffixes)
    return AdapterPlan(layout, rank, fits, wrapped, lora, _crowded(fits, tokens))


def wrapped_modules(layout: ModelLayout, targets: Sequence[str]) -> frozenset[str]:
    """Modules of the layout that vLLM wraps if it is told to wrap `targets` only; all if it is told nothing.

    A target is a path or its last part, of a module as it runs or, of one that holds several of the checkpoint's, the
    last part of any of these.

    Raises:
        InvalidRequestError: a target that no adapter can be on.
    """
    names: dict[str, set[str]] = {t.engine: {t.engine, _last(t.engine)} for t in layout.expert_targets()}
    parts: dict[str, set[str]] = {}
    for target in layout.dense_targets():
        runs = target.fused_into or target.engine
        parts.setdefault(runs, {runs, _last(runs)}).add(_last(target.engine))
    names |= {t.engine: parts[t.fused_into or t.engine] for t in layout.dense_targets()}
    if unknown := set(targets).difference(*names.values()):
        raise InvalidRequestError(
            f"SM_VLLM_LORA_TARGET_MODULES: no adapter can be on {', '.join(map(repr, sorted(unknown)))} in "
            f"{layout.architecture}, only on {', '.join(layout.engine_suffixes)}",
            code="engine_arguments",
        )
    return frozenset(engine for engine, known in names.items() if not targets or not known.isdisjoint(targets))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _crowded(fits: capacity.Capacity, tokens: Sequence[str]) -> str:
    """Whether the slots alone need more than the base model's weights leave; an estimate, so the start goes on."""
    given = flag_value(tokens, "--max-loras") or ""
    slots = int(given) if given.isdecimal() else fits.slots
    if slots * fits.slot_bytes <= fits.device_free_bytes:
        return ""
    return (
        f"{slots} adapter slots of {fits.slot_bytes >> 20} MiB may not fit: the base model's weights leave about "
        f"{fits.device_free_bytes >> 20} MiB of the device's memory"
    )


def foresee(settings: Settings, model: str, base_name: str, tokens: Sequence[str]) -> AdapterPlan | None:
    """As much of the engine's start as needs no engine: vLLM's own names, the adapter plan, vLLM's arguments.

    Raises:
        UnavailableError: vLLM is not the one that this package is built for.
        InvalidRequestError: see `adapter_plan` and `arguments.parse`.
    """
    plan = adapter_plan(settings, model, tokens)
    from lorahost.engine.vllm_026.signatures import check_signatures

    check_signatures()
    lora = None if plan is None else plan.lora
    arguments.parse(arguments.with_defaults(tokens, model=model, base_name=base_name, lora=lora))
    return plan
