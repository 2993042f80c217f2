"""Tiles as a tuned file has them: a model for each mode, with the fields that the mode reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lorahost_kernels.configs import Config, ExpandConfig, ShrinkConfig


def power_of_two(value: int) -> int:
    """The value. Raises ValueError where it isn't a power of two."""
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


Pow2 = Annotated[int, AfterValidator(power_of_two)]
Warps = Annotated[Pow2, Field(ge=1, le=16)]
Block = Annotated[Pow2, Field(ge=16, le=512)]
Stages = Annotated[int, Field(ge=1, le=8)]
Parts = Annotated[int, Field(ge=1, le=32)]
Steps = Annotated[int, Field(ge=1, le=64)]
Rows = Annotated[Literal[16, 32, 64], Field()]


class Strict(BaseModel):
    """No unknown key, no value turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PairShrink(Strict):
    """A shrink without a work list; see `configs.ShrinkConfig`. What the mode ignores can't be given."""

    mode: Literal["pair"]
    block_k: Annotated[Pow2, Field(ge=16, le=16384)]
    split_k: Parts
    ranks: Annotated[Pow2, Field(ge=1, le=512)]
    num_warps: Warps
    atomic: bool = False
    pdl: bool = True
    masks: bool = False
    specialize: bool = False


class ListShrink(Strict):
    """A shrink on a work list of block_m rows a tile."""

    mode: Literal["list"]
    block_m: Rows
    block_k: Block
    split_k: Parts
    num_warps: Warps
    num_stages: Stages
    atomic: bool = False
    pdl: bool = True
    masks: bool = False
    specialize: bool = False


class PairExpand(Strict):
    """An expand without a work list; see `configs.ExpandConfig`."""

    mode: Literal["pair"]
    block_n: Annotated[Pow2, Field(ge=16, le=1024)]
    steps: Steps
    num_warps: Warps
    group: Steps = 1
    pdl: bool = True
    masks: bool = False
    specialize: bool = False
    fused_add: bool = True


class ListFusedExpand(Strict):
    """An expand on a work list of block_m rows a tile that takes over the activation behind it."""

    mode: Literal["list"]
    block_m: Rows
    block_n: Block
    steps: Steps
    num_warps: Warps
    num_stages: Stages
    group: Steps = 1
    prefetch: bool = False
    pdl: bool = True
    masks: bool = False
    specialize: bool = False


class ListExpand(ListFusedExpand):
    """An expand on a work list of block_m rows a tile."""

    fused_add: bool = True


class PairFusedExpand(Strict):
    """An expand without a work list that takes over the step behind it; see the launchers of these."""

    mode: Literal["pair"]
    block_n: Annotated[Pow2, Field(ge=16, le=1024)]
    num_warps: Warps
    pdl: bool = True
    masks: bool = False
    specialize: bool = False


ShrinkTiles = Annotated[PairShrink | ListShrink, Field(discriminator="mode")]
ExpandTiles = Annotated[PairExpand | ListExpand, Field(discriminator="mode")]
SwigluTiles = Annotated[PairFusedExpand | ListFusedExpand, Field(discriminator="mode")]


def tiles(row: PairShrink | ListShrink | PairExpand | PairFusedExpand | ListFusedExpand) -> Config:
    """A row's tiles as the launchers take them."""
    if isinstance(row, PairShrink):
        return ShrinkConfig(**row.model_dump())
    if isinstance(row, ListShrink):
        # as the defaults have it: in mode list a program takes all ranks
        return ShrinkConfig(**row.model_dump(), ranks=0)
    return ExpandConfig(**row.model_dump())
