"""What will be tuned, in which order, and how the time is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lorahost_kernels.tune.space import Space, groupings
from lorahost_kernels.tuned.shape import ModelShape

SIZES = tuple(2**i for i in range(14))
# Tokens of a batch by how much an engine gains from them: decode at usual loads, then prefill, then what is rare.
VALUE = (16, 1, 8, 32, 64, 4, 2, 128, 2048, 8192, 1024, 256, 4096, 512)
STEPS = 40  # candidates of a typical descent: for the plan's size only


@dataclass(frozen=True)
class Place:
    """A point to tune."""

    family: str
    tokens: int


def places(shape: ModelShape, sizes: Sequence[int], families: Sequence[str]) -> list[Place]:
    """All points, the most valuable first."""
    known = [f for f in families if (shape.moe if f == "moe" else shape.modules)]
    order = sorted(set(sizes), key=lambda m: (VALUE.index(m) if m in VALUE else len(VALUE), m))
    return [Place(f, m) for m in order for f in known]


def spaces(
    shape: ModelShape, family: str, slots: int, rank: int, tokens: int, shared_limit: int, programs: int
) -> dict[str, Space]:
    """The candidates of each product of a family."""
    limits = (shared_limit, programs)
    if family == "moe":
        moe = shape.moe
        assert moe is not None
        sizes = (tokens * moe.topk, slots * moe.experts, rank)
        outs = (moe.gate_up_width,) * moe.slices
        return {
            "gate_up": Space(*sizes, moe.hidden, outs, *limits),
            "down": Space(*sizes, moe.intermediate, (moe.hidden,), *limits),
        }
    return {n: Space(tokens, slots, rank, m.k, m.outs, *limits) for n, m in shape.modules.items()}


def allowance(left: float, todo: int) -> float:
    """Seconds for the next point: the first ones, which are worth more and fill the caches, may take twice a share."""
    return left / todo * (2.0 if todo > 2 else 1.0)


def describe(
    shape: ModelShape, todo: Sequence[Place], slots: int, rank: int, budget_s: float, shared_limit: int, programs: int
) -> str:
    """The plan as text: points, groupings, neighbours of the first step, and about how much there is to measure."""
    lines = [f"{shape.name}: {len(todo)} points, {slots} adapters, rank {rank}, budget {budget_s:.0f} s"]
    total = 0
    for place in todo:
        products = spaces(shape, place.family, slots, rank, place.tokens, shared_limit, programs)
        first = next(iter(products.values()))
        ways = groupings(first.pairs, first.groups, rank)
        steps = {n: sum(len(list(s.neighbours(s.default(w)))) for w in ways) for n, s in products.items()}
        total += STEPS * len(ways) * len(products)
        tried = ", ".join("no list" if w is None else f"{w} rows" for w in ways)
        neighbours = ", ".join(f"{n} {count}" for n, count in steps.items())
        lines.append(f"  {place.family:5} M={place.tokens:<5} {tried:32} first steps: {neighbours}")
    lines.append(f"about {total} candidates, {budget_s / max(total, 1) * 1e3:.0f} ms each")
    return "\n".join(lines)
