"""What will be tuned, in which order, and how the time is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lorahost_kernels.configs import Mode
from lorahost_kernels.tune.space import FusedSpace, Space, groupings
from lorahost_kernels.tuned.shape import ModelShape

# Tokens of a batch by how much an engine gains from them: usual decode and prefill steps, then what lies between.
VALUE = (16, 1, 8192, 2048, 8, 32, 64, 4, 2, 128, 1024, 256, 4096, 512)
SECONDS_TO_START = 10.0  # of a second process, until it times
SECONDS_TO_CONFIRM = 1.5  # one point there
MOST_KEPT = 0.2  # of a budget, for the second process
LEAST_BUDGET = 60.0  # seconds; of a smaller one nothing is kept
STEPS = 40  # candidates of a typical descent: for the plan's size only


@dataclass(frozen=True)
class Place:
    """A point to tune; adapters: slots of the engine."""

    family: str
    tokens: int
    adapters: int = 8
    rank: int = 32

    def __str__(self) -> str:
        return f"{self.family} {self.adapters}x{self.rank} M={self.tokens}"


def families_of(shape: ModelShape) -> tuple[str, ...]:
    """The families that engines of a model run: experts with gate and up in one tensor have the fused expands."""
    return ("moe_fused" if shape.moe and shape.moe.interleaved else "moe", "dense")


def operations(family: str, half: str, mode: Mode) -> tuple[str, str]:
    """Names of the shrink and the expand of a product; half: "gate_up" or "down", without meaning for dense layers."""
    if family == "dense":
        return "shrink", "expand"
    expand = f"{half}_expand"
    if family == "moe_fused":
        expand = "expand_swiglu" if half == "gate_up" else "down_expand" if mode == "list" else "expand_topk_sum"
    return f"{half}_shrink", expand


def has(shape: ModelShape, family: str) -> bool:
    """Whether a model has a family's operations."""
    if family == "dense" or shape.moe is None:
        return family == "dense" and bool(shape.modules)
    return family == "moe" or shape.moe.interleaved


def places(
    shape: ModelShape,
    sizes: Sequence[int],
    families: Sequence[str],
    adapters: Sequence[int] = (8,),
    ranks: Sequence[int] = (32,),
) -> list[Place]:
    """All points, the most valuable first: by size, the experts before the dense layers."""
    known = [f for f in families if has(shape, f)]
    order = sorted(set(sizes), key=lambda m: (VALUE.index(m) if m in VALUE else len(VALUE), m))
    return [Place(f, m, a, r) for m in order for f in known for a in adapters for r in ranks]


def spaces(shape: ModelShape, place: Place, shared_limit: int, programs: int) -> dict[str, Space]:
    """The candidates of each product of a point's family."""
    slots, rank, tokens = place.adapters, place.rank, place.tokens
    limits = (shared_limit, programs)
    if place.family != "dense":
        moe = shape.moe
        assert moe is not None
        sizes = (tokens * moe.topk, slots * moe.experts, rank)
        outs = (moe.gate_up_width,) * moe.slices
        if place.family == "moe_fused":
            return {
                "gate_up": FusedSpace(*sizes, moe.hidden, outs, *limits),
                "down": FusedSpace(*sizes, moe.intermediate, (moe.hidden,), *limits, topk=moe.topk),
            }
        return {
            "gate_up": Space(*sizes, moe.hidden, outs, *limits),
            "down": Space(*sizes, moe.intermediate, (moe.hidden,), *limits),
        }
    return {n: Space(tokens, slots, rank, m.k, m.outs, *limits) for n, m in shape.modules.items()}


def allowance(left: float, todo: int) -> float:
    """Seconds for the next point: the first ones, which are worth more and fill the caches, may take twice a share."""
    return left / todo * (2.0 if todo > 2 else 1.0)


def kept(budget_s: float, points: int) -> float:
    """Seconds at a budget's end in which a second process confirms changed points; 0 of a small budget."""
    if budget_s < LEAST_BUDGET:
        return 0.0
    return min(SECONDS_TO_START + SECONDS_TO_CONFIRM * points, MOST_KEPT * budget_s)


def describe(shape: ModelShape, todo: Sequence[Place], budget_s: float, shared_limit: int, programs: int) -> str:
    """The plan as text: points, groupings, neighbours of the first step, and about how much there is to measure."""
    adapters, ranks = (
        ", ".join(map(str, dict.fromkeys(numbers))) for numbers in ([p.adapters for p in todo], [p.rank for p in todo])
    )
    lines = [f"{shape.name}: {len(todo)} points, {adapters} adapters, rank {ranks}, budget {budget_s:.0f} s"]
    total = 0
    for place in todo:
        products = spaces(shape, place, shared_limit, programs)
        first = next(iter(products.values()))
        ways = groupings(first.pairs, first.groups, place.rank)
        steps = {n: sum(len(list(s.neighbours(s.default(w)))) for w in ways) for n, s in products.items()}
        total += STEPS * len(ways) * len(products)
        tried = ", ".join("no list" if w is None else f"{w} rows" for w in ways)
        neighbours = ", ".join(f"{n} {count}" for n, count in steps.items())
        head = f"{place.family:9} {place.adapters}x{place.rank:<3} M={place.tokens:<5}"
        lines.append(f"  {head} {tried:32} first steps: {neighbours}")
    last = kept(budget_s, len(todo))
    each = (budget_s - last) / max(total, 1) * 1e3
    confirmed = f"up to {last:.0f} s at the end are kept to confirm changed points in a second process"
    # the less is kept, the more each has
    least = (
        f"at least {each:.0f} ms each; {confirmed}" if last else f"{each:.0f} ms each; no time kept to confirm points"
    )
    lines.append(f"about {total} candidates, {least}")
    return "\n".join(lines)
