"""Measured points, and the policy that picks one for a launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lorahost_kernels.configs import Config, block_r
from lorahost_kernels.tuned.schema import MoeFusedPoint, MoePoint, TunedFile
from lorahost_kernels.tuned.shape import ModelShape, Module, MoeShape
from lorahost_kernels.tuned.tiles import tiles

Family = Literal["moe", "moe_fused", "dense"]
Source = Literal["exact", "nearest", "default"]
# A launch's columns, in (shrink) or out (expand) of each slice, as a row's key.
RowKey = tuple[str, tuple[int, ...]]
FACTOR = 2.0  # how far tokens and slots may be away
SIZE_SHARE = 0.08  # how far an expert's sizes may be away: backends pad 2880 to 2944 or 3072
OPERATIONS: dict[Family, tuple[str, ...]] = {
    "moe": ("gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand"),
    "moe_fused": ("gate_up_shrink", "expand_swiglu", "down_shrink", "expand_topk_sum", "down_expand"),
    "dense": ("shrink", "expand"),
}


@dataclass(frozen=True)
class TablePoint:
    """One point: rows by operation and columns; source: the file that it is from."""

    adapters: int
    rank: int
    tokens: int
    rows: Mapping[RowKey, Config]
    source: str

    @property
    def block_m(self) -> int | None:
        """Rows per tile of the work list that its rows share; None: no list."""
        config = next(iter(self.rows.values()))
        return config.block_m if config.mode == "list" else None


@dataclass
class FamilyPoints:
    """A family's points in files of one shape; exact_shape: the sizes are the model's, not only near them."""

    points: dict[tuple[int, int, int], TablePoint] = field(default_factory=dict)
    exact_shape: bool = True

    def add(self, points: Iterable[TablePoint]) -> None:
        """Adds points; what is there already stays."""
        for p in points:
            self.points.setdefault((p.adapters, p.rank, p.tokens), p)

    def find(self, slots: int, rank: int, tokens: int) -> tuple[TablePoint | None, Source]:
        """The point for a batch and how it was found."""
        exact = self.points.get((slots, rank, tokens))
        if exact is not None:
            return exact, "exact" if self.exact_shape else "nearest"
        near = [(distance(p, slots, rank, tokens), -p.tokens, p.adapters, p.rank, p) for p in self.points.values()]
        best = min(near, key=lambda n: n[:4], default=None)
        if best is None or best[0] == math.inf:
            return None, "default"
        return best[4], "nearest"


def distance(p: TablePoint, slots: int, rank: int, tokens: int) -> float:
    """Doublings between a point and a batch; infinite beyond what may be taken."""
    if block_r(p.rank) != block_r(rank) or tokens < 1:
        return math.inf
    away = [abs(math.log2(p.tokens / tokens)), abs(math.log2(p.adapters / slots))]
    return sum(away) if max(away) <= math.log2(FACTOR) else math.inf


def near(a: int, b: int) -> bool:
    """Whether two sizes of experts are one family's."""
    return abs(a - b) <= SIZE_SHARE * min(a, b)


def same_experts(a: MoeShape, b: MoeShape) -> bool:
    """Whether rows of one shape may serve the other."""
    fixed = (a.experts, a.topk, a.slices) == (b.experts, b.topk, b.slices)
    return fixed and near(a.hidden, b.hidden) and near(a.intermediate, b.intermediate)


def moe_rows(shape: MoeShape) -> dict[str, RowKey]:
    """The key of each operation of the experts."""
    return {
        "gate_up_shrink": ("gate_up_shrink", (shape.hidden,) * shape.slices),
        "gate_up_expand": ("gate_up_expand", (shape.gate_up_width,) * shape.slices),
        "down_shrink": ("down_shrink", (shape.intermediate,)),
        "down_expand": ("down_expand", (shape.hidden,)),
        "expand_swiglu": ("expand_swiglu", (shape.gate_up_width,) * shape.slices),
        "expand_topk_sum": ("expand_topk_sum", (shape.hidden,)),
    }


def dense_row(module: Module, operation: str) -> RowKey:
    """The key of a dense module's operation."""
    return operation, (module.k,) * len(module.outs) if operation == "shrink" else module.outs


class Table:
    """The points that serve one model on one GPU.

    Args:
        gpu: The GPU's name.
        shape: The model's shape on this GPU.
        slots: Adapter slots of the engine.
        fused: Whether its experts run the fused expands.
    """

    def __init__(self, gpu: str, shape: ModelShape, slots: int, fused: bool = False) -> None:
        self.gpu, self.shape, self.slots, self.fused = gpu, shape, slots, fused
        self.families: dict[Family, FamilyPoints] = {family: FamilyPoints() for family in OPERATIONS}

    @property
    def experts(self) -> Family:
        """The family whose rows the experts take: moe for a fused engine too where no file has moe_fused rows."""
        return "moe_fused" if self.fused and self.families["moe_fused"].points else "moe"

    def operations(self) -> dict[str, Family]:
        """The operations that the engine runs, each with the family whose rows it takes."""
        experts = OPERATIONS["moe_fused" if self.fused else "moe"]
        return {**dict.fromkeys(experts, self.experts), **dict.fromkeys(OPERATIONS["dense"], "dense")}

    def add_file(self, file: TunedFile, source: str) -> None:
        """Takes the points of a file that are of this model's shape."""
        theirs, ours = file.moe_shape, self.shape.moe
        if theirs and ours and same_experts(theirs, ours):
            self._add_experts("moe", file.moe, ours, theirs == ours, source)
            self._add_experts("moe_fused", file.moe_fused, ours, theirs == ours, source)
        wanted = set(self.shape.modules.values())
        modules = {name: m for name, m in file.module_shapes().items() if m in wanted}
        for p in file.dense:
            rows = {
                dense_row(modules[name], op): tiles(row.config)
                for (name, op), row in p.rows().items()
                if name in modules
            }
            if rows:
                self.families["dense"].add([TablePoint(p.adapters, p.rank, p.tokens, rows, source)])

    def _add_experts(
        self, family: Family, found: Sequence[MoePoint | MoeFusedPoint], shape: MoeShape, exact: bool, source: str
    ) -> None:
        keys, points = moe_rows(shape), self.families[family]
        points.exact_shape = points.exact_shape and exact
        points.add(
            TablePoint(
                p.adapters,
                p.rank,
                p.tokens,
                {keys[op]: tiles(row.config) for (_, op), row in p.rows().items()},
                source,
            )
            for p in found
        )

    def family_of(self, groups: int) -> Family | None:
        """Whose batch has so many (slot, expert) pairs; None: not one of this model's."""
        moe = self.shape.moe
        if moe and groups == self.slots * moe.experts:
            return self.experts
        return "dense" if groups == self.slots else None

    def topk(self, family: Family) -> int:
        """Rows of a batch for each token."""
        return self.shape.moe.topk if family != "dense" and self.shape.moe else 1
