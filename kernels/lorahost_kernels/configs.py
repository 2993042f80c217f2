"""Tile parameters as data, and the defaults chosen from a batch's shape.

A tuner or a JSON file may replace any of these; the launchers take a config argument and ask here only without one.
"""

from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["pair", "scan", "list"]
SCAN_LIMIT = 1024  # pairs that one program can scan by itself


@dataclass(frozen=True)
class ShrinkConfig:
    """mode: how programs find rows (ops.common.device); block_k * steps columns per program, split_k programs.

    atomic: add the parts with relaxed atomics into one zeroed buffer instead of storing fp32 partial sums.
    """

    mode: Mode = "pair"
    block_m: int = 16
    block_k: int = 512
    split_k: int = 1
    ranks: int = 4
    num_warps: int = 4
    num_stages: int = 3
    atomic: bool = False
    pdl: bool = False
    prefetch: bool = False


@dataclass(frozen=True)
class ExpandConfig:
    """steps tiles of block_n columns per program; group tiles of rows take turns on one chunk of B (L2 reuse)."""

    mode: Mode = "pair"
    block_m: int = 16
    block_n: int = 512
    steps: int = 1
    num_warps: int = 4
    num_stages: int = 1
    group: int = 1
    pdl: bool = False
    prefetch: bool = False


@dataclass(frozen=True)
class OpConfig:
    """Both halves of one LoRA product; fused: one launch, its expand programs await its shrink programs.

    prefetch_b: the shrink programs of a fused launch ask for B ahead of the expand programs.
    """

    shrink: ShrinkConfig
    expand: ExpandConfig
    fused: bool = False
    prefetch_b: bool = False

    def with_pdl(self, pdl: bool) -> "OpConfig":
        """The same tiles with programmatic dependent launch on or off."""
        return replace(self, shrink=replace(self.shrink, pdl=pdl), expand=replace(self.expand, pdl=pdl))


def pick_mode(pairs: int, groups: int) -> Mode:
    """pair while few pairs can share weights, scan while one program can see them all, else list."""
    if pairs <= 64 and pairs <= 2 * groups:
        return "pair"
    return "scan" if pairs <= SCAN_LIMIT else "list"


def list_block_m(pairs: int, groups: int) -> int:
    """Rows per tile of the work list: about the rows that a (slot, expert) group has."""
    rows = pairs / max(groups, 1)
    return 16 if rows <= 16 else 32 if rows <= 48 else 64


def default_config(pairs: int, groups: int, rank: int, k: int, n: int) -> OpConfig:
    """Tiles for `pairs` rows over `groups` (adapter, expert) pairs, K = k columns in and n out per slice."""
    mode = pick_mode(pairs, groups)
    block_r = max(16, 1 << (rank - 1).bit_length())
    if mode == "pair":
        block = max(64, min(512, 16384 // block_r))
        return OpConfig(
            ShrinkConfig("pair", 16, block, -(-k // block), 4), ExpandConfig("pair", 16, block, 1, 4)
        )
    if mode == "scan":
        return OpConfig(ShrinkConfig("scan", 16, 64, -(-k // 576), 4, 4), ExpandConfig("scan", 16, 128, 2, 4))
    block_m = list_block_m(pairs, groups)
    splits = 4 if pairs <= 8192 else 1
    return OpConfig(ShrinkConfig("list", block_m, 64, splits, 4, 4), ExpandConfig("list", block_m, 128, 4, 4))
