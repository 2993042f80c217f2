"""The table that this process uses: cached lookups, and the report of where its tiles came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lorahost_kernels import configs
from lorahost_kernels.configs import Config, Launch, ShrinkConfig
from lorahost_kernels.tuned import legal
from lorahost_kernels.tuned.table import OPERATIONS, Family, RowKey, Source, Table, TablePoint, moe_rows, near

MAX_CACHED = 65536
SOURCES: tuple[Source, ...] = ("exact", "nearest", "default")


class Active:
    """A `configs.Chooser` on a table.

    Args:
        table: The points.
        shared_limit: Bytes of shared memory that one program may have on this GPU.
    """

    def __init__(self, table: Table, shared_limit: int) -> None:
        self.table, self.shared_limit = table, shared_limit
        self.lookups = {op: dict.fromkeys(SOURCES, 0) for op in table.operations()}
        self._tiles: dict[Launch, Config | None] = {}
        self._blocks: dict[tuple[int, int, int], int | Literal[False] | None] = {}

    def block_m(self, pairs: int, groups: int, rank: int) -> int | Literal[False] | None:
        """See configs.Chooser."""
        key = (pairs, groups, rank)
        if key not in self._blocks:
            if len(self._blocks) >= MAX_CACHED:
                self._blocks.clear()
            self._blocks[key] = self._find_block(*key)
        return self._blocks[key]

    def tiles(self, launch: Launch) -> Config | None:
        """See configs.Chooser."""
        if launch not in self._tiles:
            if len(self._tiles) >= MAX_CACHED:
                self._tiles.clear()
            config, source = self._find_tiles(launch)
            self._tiles[launch] = config
            if launch.operation in self.lookups:
                self.lookups[launch.operation][source] += 1
        return self._tiles[launch]

    def _find_block(self, pairs: int, groups: int, rank: int) -> int | Literal[False] | None:
        family = self.table.family_of(groups)
        if family is None or pairs % self.table.topk(family):
            return False
        point, _ = self.table.families[family].find(self.table.slots, rank, pairs // self.table.topk(family))
        # a list in tiles that one of the rows can't run would leave that operation without its row
        if point is None or any(self._problem(op, c, rank, point.block_m, 2) for (op, _), c in point.rows.items()):
            return False
        return point.block_m

    def _find_tiles(self, launch: Launch) -> tuple[Config | None, Source]:
        family: Family = "dense" if launch.operation in OPERATIONS["dense"] else self.table.experts
        moe = self.table.shape.moe
        if launch.slots != self.table.slots or launch.topk != self.table.topk(family):
            return None, "default"
        if family != "dense" and (moe is None or launch.experts != moe.experts):
            return None, "default"
        point, source = self.table.families[family].find(launch.slots, launch.rank, launch.tokens)
        found = point and self._row(point, launch, family)
        if not found:
            return None, "default"
        key, config = found
        shrinks = isinstance(config, ShrinkConfig)
        if shrinks != launch.operation.endswith("shrink"):
            return None, "default"
        if self._problem(launch.operation, config, launch.rank, launch.block_m, launch.item):
            return None, "default"
        return config, source if key[1] == launch.columns else "nearest"

    def _row(self, point: TablePoint, launch: Launch, family: Family) -> tuple[RowKey, Config] | None:
        """The point's row for a launch; an expert's columns may be padded."""
        key: RowKey = (launch.operation, launch.columns)
        if family != "dense":
            assert self.table.shape.moe is not None
            key = moe_rows(self.table.shape.moe).get(launch.operation, key)
            if len(key[1]) != len(launch.columns) or not all(map(near, key[1], launch.columns)):
                return None
        config = point.rows.get(key)
        return None if config is None else (key, config)

    def _problem(self, operation: str, config: Config, rank: int, block_m: int | None, item: int) -> str:
        wrong = legal.problem(config, rank, block_m, self.shared_limit, item)
        if operation == "expand_topk_sum":
            wrong = wrong or legal.topk_sum_problem(config, self.table.topk("moe_fused"), rank)
        return wrong


_active: Active | None = None
_notes: dict[str, Any] = {}


def activate(table: Table, shared_limit: int = 227 * 1024, notes: Mapping[str, Any] | None = None) -> Active:
    """Makes this process use a table; the next call replaces it. notes: more for the report."""
    global _active, _notes
    _active, _notes = Active(table, shared_limit), dict(notes or {})
    configs.use(_active)
    return _active


def deactivate() -> None:
    """Back to the defaults."""
    global _active, _notes
    _active, _notes = None, {}
    configs.use(None)


def report() -> dict[str, Any]:
    """Where each operation's tiles come from, JSON types only; no operations: no table is active.

    An operation's `family` is whose rows it takes, its `source` that of the engine's slots at any batch size: exact
    where there are points of just these slots, nearest, or default; `lookups` counts the different launches so far by
    what they got.
    """
    if _active is None:
        return {"active": False, "operations": {}}
    table = _active.table
    operations = {
        op: {**summary(table, family, op), "lookups": dict(_active.lookups[op])}
        for op, family in table.operations().items()
    }
    head = {"active": True, "gpu": table.gpu, "model": table.shape.name, "fused": table.fused}
    return {**head, **_notes, "operations": operations}


def summary(table: Table, family: Family, operation: str) -> dict[str, Any]:
    """What a table has for an operation at the engine's slots."""
    points = table.families[family]
    having = [p for p in points.points.values() if any(key[0] == operation for key in p.rows)]
    exact = [p for p in having if p.adapters == table.slots]
    close = [p for p in having if 0.5 <= p.adapters / table.slots <= 2]
    used = exact or close
    source: Source = "exact" if exact and points.exact_shape else "nearest" if used else "default"
    return {
        "source": source,
        "family": family,
        "rows": len(used),
        "ranks": sorted({p.rank for p in used}),
        "tokens": sorted({p.tokens for p in used}),
        "files": sorted({p.source for p in used}),
    }
