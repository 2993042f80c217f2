"""The format of a tuned configuration file: one GPU, one model, its measured points."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lorahost_kernels.tuned import legal
from lorahost_kernels.tuned.lines import ConfigError, line_of, parse
from lorahost_kernels.tuned.shape import Module, MoeShape
from lorahost_kernels.tuned.tiles import (
    ExpandTiles,
    ListExpand,
    PairFusedExpand,
    ShrinkTiles,
    Strict,
    SwigluTiles,
    tiles,
)

FORMAT = 1
MOE_OPERATIONS = ("gate_up_shrink", "gate_up_expand", "down_shrink", "down_expand")
FUSED_OPERATIONS = ("gate_up_shrink", "expand_swiglu", "down_shrink", "expand_topk_sum", "down_expand")
DENSE_OPERATIONS = ("shrink", "expand")


Microseconds = Annotated[float, Field(gt=0, lt=1e7, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class Timed(Strict):
    """Times with the defaults and with what the file gives."""

    before_us: Microseconds
    after_us: Microseconds


class ShrinkRow(Timed):
    """Tiles of a shrink, and its time alone."""

    config: ShrinkTiles


class ExpandRow(Timed):
    """Tiles of an expand, and its time alone."""

    config: ExpandTiles


class SwigluRow(Timed):
    """Tiles of expand_swiglu, and its time alone."""

    config: SwigluTiles


class TopkSumRow(Timed):
    """Tiles of expand_topk_sum, and its time alone."""

    config: PairFusedExpand


class ListExpandRow(Timed):
    """Tiles of an expand on a work list, and its time alone."""

    config: ListExpand


Row = ShrinkRow | ExpandRow | SwigluRow | TopkSumRow | ListExpandRow


class DenseRows(Strict):
    """The operations of one dense module."""

    shrink: ShrinkRow | None = None
    expand: ExpandRow | None = None


class Point(Timed):
    """One measured place; times are the whole family's, run: index into the file's runs."""

    run: Annotated[int, Field(ge=0)]
    adapters: Annotated[int, Field(ge=1, le=4096)]
    rank: Annotated[int, Field(ge=1, le=512)]
    tokens: Annotated[int, Field(ge=1, le=2**20)]

    @abstractmethod
    def rows(self) -> dict[tuple[str, str], Row]:
        """(module or nothing, operation) -> row."""

    @model_validator(mode="after")
    def check(self) -> Point:
        """No point without rows, none slower than the defaults, none whose tiles need two work lists."""
        rows = self.rows()
        if not rows:
            raise ValueError("a point needs a row of at least one operation")
        if self.after_us > self.before_us:
            raise ValueError(f"after_us={self.after_us} is slower than before_us={self.before_us}")
        found = {name: (row.config.mode, getattr(row.config, "block_m", None)) for name, row in rows.items()}
        if len(set(found.values())) > 1:
            texts = [f"{' '.join(filter(None, n))}: {m} {b or ''}".strip() for n, (m, b) in found.items()]
            raise ValueError(f"operations that share a work list must agree on mode and block_m: {'; '.join(texts)}")
        for name, row in rows.items():
            wrong = legal.unsafe(tiles(row.config))
            if wrong:
                raise ValueError(f"{' '.join(filter(None, name))}: {wrong}")
        return self


class MoePoint(Point):
    """A point of the experts."""

    gate_up_shrink: ShrinkRow | None = None
    gate_up_expand: ExpandRow | None = None
    down_shrink: ShrinkRow | None = None
    down_expand: ExpandRow | None = None

    def rows(self) -> dict[tuple[str, str], Row]:
        """See Point."""
        return {("", op): row for op in MOE_OPERATIONS if (row := getattr(self, op)) is not None}


class MoeFusedPoint(Point):
    """A point of experts whose expands take over the step behind them; without a list down ends in the sum."""

    gate_up_shrink: ShrinkRow | None = None
    expand_swiglu: SwigluRow | None = None
    down_shrink: ShrinkRow | None = None
    expand_topk_sum: TopkSumRow | None = None
    down_expand: ListExpandRow | None = None

    def rows(self) -> dict[tuple[str, str], Row]:
        """See Point."""
        return {("", op): row for op in FUSED_OPERATIONS if (row := getattr(self, op)) is not None}


class DensePoint(Point):
    """A point of the dense modules, which share one work list a step."""

    modules: dict[str, DenseRows]

    def rows(self) -> dict[tuple[str, str], Row]:
        """See Point."""
        return {
            (module, op): row
            for module, both in self.modules.items()
            for op in DENSE_OPERATIONS
            if (row := getattr(both, op)) is not None
        }


class Experts(Strict):
    """Sizes of the experts; see `shape.MoeShape`."""

    experts: Size
    topk: Size
    hidden: Size
    intermediate: Size
    slices: Literal[1, 2]


class Linear(Strict):
    """Sizes of a dense module: columns in, columns out of each slice."""

    k: Size
    outs: Annotated[list[Size], Field(min_length=1, max_length=4)]


class Run(Strict):
    """With what some points were measured."""

    driver: Text
    torch: Text
    triton: Text
    git_revision: Text
    date: datetime.date
    mix: Text

    @model_validator(mode="before")
    @classmethod
    def iso_date(cls, data: Any) -> Any:
        """JSON has no dates: takes YYYY-MM-DD."""
        if isinstance(data, dict) and isinstance(data.get("date"), str):
            return {**data, "date": datetime.date.fromisoformat(data["date"])}
        return data


class TunedFile(Strict):
    """A whole file."""

    format: Literal[1]
    gpu: Text
    model: Text
    experts: Experts | None = None
    modules: dict[str, Linear] = Field(default_factory=dict)
    runs: list[Run]
    moe: list[MoePoint] = Field(default_factory=list)
    moe_fused: list[MoeFusedPoint] = Field(default_factory=list)
    dense: list[DensePoint] = Field(default_factory=list)

    @model_validator(mode="after")
    def check(self) -> TunedFile:
        """Every point has its run and its shape, and is there once."""
        if (self.moe or self.moe_fused) and self.experts is None:
            raise ValueError("moe points need experts")
        self.check_fused()
        for family, points in (("moe", self.moe), ("moe_fused", self.moe_fused), ("dense", self.dense)):
            seen: set[tuple[int, int, int]] = set()
            for i, p in enumerate(points):
                if p.run >= len(self.runs):
                    raise at((family, i, "run"), f"run={p.run}, but there are {len(self.runs)} runs")
                key = (p.adapters, p.rank, p.tokens)
                if key in seen:
                    text = "adapters={}, rank={}, tokens={} is there twice".format(*key)
                    raise at((family, i), text)
                seen.add(key)
        for i, point in enumerate(self.dense):
            unknown = sorted(set(point.modules) - set(self.modules))
            if unknown:
                raise at(("dense", i, "modules", unknown[0]), f"no module {unknown[0]!r} in the file's modules")
        return self

    def check_fused(self) -> None:
        """The fused expands are for gate and up in one tensor, and hold B of all of a token's experts."""
        if self.moe_fused and self.experts and self.experts.slices != 1:
            raise at(("moe_fused",), "moe_fused points need experts of 1 slice")
        for i, p in enumerate(self.moe_fused):
            if p.expand_topk_sum and self.experts:
                wrong = legal.topk_sum_problem(tiles(p.expand_topk_sum.config), self.experts.topk, p.rank)
                if wrong:
                    raise at(("moe_fused", i, "expand_topk_sum"), wrong)

    @property
    def moe_shape(self) -> MoeShape | None:
        """The experts as a shape."""
        return MoeShape(**self.experts.model_dump()) if self.experts else None

    def module_shapes(self) -> dict[str, Module]:
        """The modules as shapes."""
        return {name: Module(m.k, tuple(m.outs)) for name, m in self.modules.items()}


def at(path: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """An error of a place deeper in the file than the model that finds it."""
    return PydanticCustomError("tuned", message.replace("{", "(").replace("}", ")"), {"path": path})


def read(path: Path) -> TunedFile:
    """A file, checked.

    Raises:
        ConfigError: it can't be read, is no JSON, or breaks the format; the message names file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    value, lines = parse(text, str(path))
    try:
        return TunedFile.model_validate(value)
    except ValidationError as error:
        raise ConfigError(describe(error, lines, str(path))) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def describe(error: ValidationError, lines: dict[tuple[str | int, ...], int], where: str) -> str:
    """The first problem with its line and field, and how many more there are."""
    found = error.errors(include_url=False)
    first = found[0]
    loc = first.get("ctx", {}).get("path", first["loc"])
    field = ".".join(str(step) for step in loc) or "file"
    value = repr(first.get("input"))
    shown = f", got {value}" if len(value) <= 60 and first["type"] != "missing" else ""
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    return f"{where}:{line_of(lines, loc)}: {field}: {first['msg']}{shown}{more}"
