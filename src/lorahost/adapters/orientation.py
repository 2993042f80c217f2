"""Which stacked expert tensors are gate_up and down, and whether their PEFT swapped input and output.

PEFT stores LoRA on a 3D parameter as lora_A (r·E, in) and lora_B (out, r·E). Where a release took the parameter's
axes the wrong way round, lora_A has the output's width and the change of one expert is (B·A)ᵀ. Shapes tell, except
for a square projection, where the releases differ:

- before 0.19.0: axes taken as (E, in, out), so models that keep (E, out, in) come out swapped;
- 0.19.0: the condition was inverted, so (E, out, in) is right and (E, in, out) depends on transformers;
- from 0.19.1: right for both, given transformers 5 for (E, in, out).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lorahost.adapters.layout import ExpertTarget
from lorahost.adapters.matching import ExpertPairs, Pair, wrong_shape
from lorahost.errors import AdapterRejectedError

StackedRole = Literal["gate_up", "down"]


@dataclass(frozen=True, slots=True)
class StackedPart:
    """One stacked pair, understood.

    Attributes:
        rank: Rank of one expert.
        swapped: lora_A and lora_B are for the transposed weight.
    """

    role: StackedRole
    pair: Pair
    rank: int
    swapped: bool


def resolve(
    experts: Iterable[tuple[ExpertTarget, ExpertPairs]], peft_version: str | None
) -> tuple[dict[str, list[StackedPart]], list[str]]:
    """The stacked parts of every layer by engine path, and warnings.

    Raises:
        AdapterRejectedError: shapes that fit no projection, both orientations in one adapter, or an orientation
            that can't be told.
    """
    found = [
        (target, *_classify(target, pair))
        for target, pairs in experts
        for pair in _distinct_roles(target, pairs.stacked)
    ]
    decided = {next(iter(o)) for _, _, _, _, o in found if len(o) == 1}
    warnings: list[str] = []
    if len(decided) > 1:
        raise AdapterRejectedError(
            "some stacked expert tensors have input and output swapped and some have not; "
            "expected one PEFT release's layout throughout",
            code="mixed_layout",
        )
    if found and not decided:
        target, _, pair, *_ = found[0]
        swapped, warning = _by_version(target, pair, peft_version)
        decided = {swapped}
        warnings += [warning] if warning else []
    parts: dict[str, list[StackedPart]] = {}
    for target, role, pair, rank, _ in found:
        parts.setdefault(target.engine, []).append(StackedPart(role, pair, rank, next(iter(decided))))
    return parts, warnings


def _classify(target: ExpertTarget, pair: Pair) -> tuple[StackedRole, Pair, int, set[bool]]:
    """Role, rank of one expert and possible values of `swapped`; shapes never fit two roles."""
    a, b = pair.a.shape, pair.b.shape
    expected = _expected(target)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1 or a[0] % target.num_experts:
        raise wrong_shape(pair, expected)
    rank = a[0] // target.num_experts
    roles: tuple[StackedRole, StackedRole] = ("gate_up", "down")
    for role in roles:
        n_in, n_out = target.features(role)
        fits = {swapped for swapped, shape in ((False, (n_in, n_out)), (True, (n_out, n_in))) if shape == (a[1], b[0])}
        if fits:
            return role, pair, rank, fits
    raise wrong_shape(pair, expected)


def _distinct_roles(target: ExpertTarget, pairs: list[Pair]) -> list[Pair]:
    roles = [_classify(target, pair)[0] for pair in pairs]
    if len(set(roles)) != len(roles):
        raise wrong_shape(pairs[-1], f"one pair for gate_up and one for down: {_expected(target)}")
    return pairs


def _expected(target: ExpertTarget) -> str:
    e, h, i = target.num_experts, target.hidden, target.intermediate
    return f"(r*{e}, {h}) and ({2 * i}, r*{e}) for gate_up, (r*{e}, {i}) and ({h}, r*{e}) for down"


def _by_version(target: ExpertTarget, pair: Pair, peft_version: str | None) -> tuple[bool, str]:
    """(swapped, warning) for square projections."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", peft_version or "")
    if found is not None and "dev" not in (peft_version or ""):
        version = tuple(int(n or 0) for n in found.groups())
        if version >= (0, 19, 1):
            assumed = f"{pair.module} is square; read as PEFT {peft_version} with transformers 5 writes it"
            return False, assumed if target.transposed else ""
        if version < (0, 19, 0):
            return not target.transposed, ""
        if not target.transposed:
            return True, ""
    raise AdapterRejectedError(
        f"{pair.module}: {list(pair.a.shape)} and {list(pair.b.shape)} fit with and without input and output "
        f"swapped, as PEFT releases differ, and adapter_config.json has peft_version {peft_version!r}; expected a "
        "release that tells (below 0.19.0, or 0.19.1 and later), or LoRA on gate_up too",
        code="ambiguous_orientation",
        details={"module": pair.module, "peft_version": peft_version},
    )
