"""Every tensor of an adapter gets its place in the base model, or the adapter is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from lorahost.adapters.layout import DenseTarget, ExpertTarget, ModelLayout, Role
from lorahost.adapters.tensors import TensorInfo
from lorahost.errors import AdapterRejectedError

_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_SHOWN = 5

_FOREIGN = (
    ("lora_magnitude_vector", "dora_unsupported", "DoRA magnitudes"),
    ("lora_embedding_", "embedding_unsupported", "LoRA on an embedding"),
    ("trainable_tokens", "trainable_tokens_unsupported", "trained token embeddings"),
    (".lora_A.bias", "bias_unsupported", "a LoRA bias"),
    (".lora_B.bias", "bias_unsupported", "a LoRA bias"),
    ("modules_to_save", "modules_to_save_unsupported", "full weights from modules_to_save"),
    ("embed_tokens", "embedding_unsupported", "full weights of the embedding"),
    ("lm_head", "embedding_unsupported", "full weights of lm_head"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """lora_A and lora_B of one module, by the module's path in the checkpoint."""

    module: str
    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass
class ExpertPairs:
    """What the checkpoint has for the experts of one layer: per expert, or stacked, never both.

    Attributes:
        source: The experts module's path in the checkpoint.
        per_expert: (role, expert) -> pair.
        stacked: Pairs of PEFT's stacked layout, one for each parameter; which is which shows in the shapes.
    """

    source: str
    per_expert: dict[tuple[Role, int], Pair] = field(default_factory=dict)
    stacked: list[Pair] = field(default_factory=list)


@dataclass
class Matched:
    """An adapter's tensors by target; targets by engine path."""

    dense: dict[str, tuple[DenseTarget, Pair]] = field(default_factory=dict)
    experts: dict[str, tuple[ExpertTarget, ExpertPairs]] = field(default_factory=dict)


def match(infos: Mapping[str, TensorInfo], layout: ModelLayout) -> Matched:
    """Sorts all tensors into the layout's targets; shapes of dense and per-expert pairs are checked.

    Raises:
        AdapterRejectedError: an unpaired, unknown, unservable, duplicate or misshapen tensor.
    """
    matched = Matched()
    unknown: list[str] = []
    for pair in _pairs(infos):
        if dense := layout.dense.get(pair.module):
            _check_shape(pair, dense.in_features, dense.out_features)
            if dense.engine in matched.dense:
                raise _duplicate(pair.module, matched.dense[dense.engine][1].module)
            matched.dense[dense.engine] = dense, pair
        elif not _match_expert(pair, layout, matched):
            if reason := layout.unservable.get(pair.module):
                raise AdapterRejectedError(
                    f"the adapter has LoRA on {pair.module}: {reason}",
                    code="unservable_module",
                    details={"module": pair.module},
                )
            unknown.append(pair.module)
    if unknown:
        raise AdapterRejectedError(
            f"{len(unknown)} modules of the adapter are not in the base model ({layout.architecture}): "
            f"{_some(unknown)}; the base model's layers have {layout.summary()}",
            code="unknown_module",
            details={"unknown": unknown[:_SHOWN], "unknown_count": len(unknown)},
        )
    return matched


def _pairs(infos: Mapping[str, TensorInfo]) -> list[Pair]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    for name, info in infos.items():
        found = _PAIR.fullmatch(name)
        if found is None:
            raise _foreign(name)
        module, half = found.groups()
        if half in halves.setdefault(module, {}):
            raise _duplicate(name, halves[module][half].name)
        halves[module][half] = info
    lonely = [f"{m} (only lora_{next(iter(h))})" for m, h in halves.items() if len(h) == 1]
    if lonely:
        raise AdapterRejectedError(
            f"{len(lonely)} modules lack one of lora_A and lora_B: {_some(lonely)}", code="unpaired_tensor"
        )
    if not halves:
        raise AdapterRejectedError("the adapter has no tensors", code="no_tensors")
    return [Pair(module, h["A"], h["B"]) for module, h in halves.items()]


def _match_expert(pair: Pair, layout: ModelLayout, matched: Matched) -> bool:
    """Files `pair` under its experts target; False when it belongs to none."""
    per_expert = _EXPERT.fullmatch(pair.module)
    source = per_expert[1] if per_expert else pair.module.removesuffix(".base_layer")
    target = layout.experts.get(source)
    if target is None:
        return False
    pairs = matched.experts.setdefault(target.engine, (target, ExpertPairs(source)))[1]
    if pairs.source != source:
        raise _duplicate(pair.module, pairs.source)
    if per_expert is None:
        pairs.stacked.append(pair)
    else:
        expert, role = int(per_expert[2]), target.name_aliases.get(per_expert[3])
        if role is None:
            return False
        if expert >= target.num_experts:
            raise AdapterRejectedError(
                f"{pair.module}: expert {expert}, but the base model has {target.num_experts} experts a layer",
                code="wrong_shape",
                details={"module": pair.module, "got": expert, "expected": target.num_experts},
            )
        _check_shape(pair, *target.features(role))
        if (role, expert) in pairs.per_expert:
            raise _duplicate(pair.module, pairs.per_expert[role, expert].module)
        pairs.per_expert[role, expert] = pair
    if pairs.stacked and pairs.per_expert:
        raise AdapterRejectedError(
            f"{source} has stacked tensors and per-expert ones; expected one layout", code="mixed_layout"
        )
    return True


def _check_shape(pair: Pair, n_in: int, n_out: int) -> None:
    a, b = pair.a.shape, pair.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1 or (a[1], b[0]) != (n_in, n_out):
        raise wrong_shape(pair, f"(r, {n_in}) and ({n_out}, r)")


def wrong_shape(pair: Pair, expected: str) -> AdapterRejectedError:
    """The refusal for a pair whose shapes don't fit the base model."""
    got = f"{list(pair.a.shape)} and {list(pair.b.shape)}"
    return AdapterRejectedError(
        f"{pair.module}: lora_A and lora_B are {got}, the base model needs {expected}",
        code="wrong_shape",
        details={"module": pair.module, "got": got, "expected": expected},
    )


def _foreign(name: str) -> AdapterRejectedError:
    for mark, code, what in _FOREIGN:
        if mark in name:
            return AdapterRejectedError(f"{name} is {what}, which can't be served with LoRA", code=code)
    return AdapterRejectedError(
        f"{name} is not a LoRA tensor; expected names ending in lora_A.weight or lora_B.weight",
        code="unknown_tensor",
    )


def _duplicate(one: str, other: str) -> AdapterRejectedError:
    return AdapterRejectedError(f"{one} and {other} are for the same module", code="duplicate_module")


def _some(items: Iterable[str]) -> str:
    items = cast(list[str], list(items))
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
