"""Tile parameters as data, and the defaults chosen from a batch's shape.

A tuned table may be put in front of the defaults (`use`); the launchers take a config and ask here only without one.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Mode = Literal["pair", "list"]
# Up to (pairs, pairs per (slot, expert) group) each pair reads its own weights: few pairs, or few that can share.
# Measured, see docs/kernels.md.
PAIR_LIMITS = ((16, float("inf")), (64, 4.0), (128, 1.0), (512, 0.5))
# The same for ranks up to 16. With rank 32 eight adapters in the batch gain by it and one alone loses twice as much.
LOW_RANK_LIMIT = (256, 1.0)
MULTIPROCESSORS = 132  # of an H200
PROGRAMS = 800  # programs that fill an H200 about once with these tiles
# Whether batches with a work list have the activation in gate_up's expand; without one they always do.
FUSED_LIST = True


@dataclass(frozen=True)
class ShrinkConfig:
    """mode: pair (matrix-vector products, one pair a program) or list (tensor cores, needs a work list).

    ranks: ranks per program in mode pair; split_k: parts of K, summed up by expand;
    atomic: add the parts with relaxed atomics into one zeroed buffer instead of storing them side by side;
    pdl: programmatic dependent launch, ignored below sm_90;
    masks: keep the masks of columns where the blocks divide them; specialize: let Triton compile a variant for each
    kind of count and alignment of the lists.
    """

    mode: Mode = "pair"
    block_m: int = 16
    block_k: int = 1024
    split_k: int = 1
    ranks: int = 2
    num_warps: int = 4
    num_stages: int = 4
    atomic: bool = False
    pdl: bool = True
    masks: bool = False
    specialize: bool = False


@dataclass(frozen=True)
class ExpandConfig:
    """steps tiles of block_n columns per program; group tiles of rows take turns on one chunk of B (L2 reuse).

    num_stages: depth of the copies to shared memory in mode list; prefetch: ask for B before the PDL wait;
    fused_add: add into the base output in the same launch; without, a negative zero in the output becomes zero;
    pdl, masks, specialize: see ShrinkConfig.
    """

    mode: Mode = "pair"
    block_m: int = 16
    block_n: int = 128
    steps: int = 1
    num_warps: int = 4
    num_stages: int = 4
    group: int = 1
    prefetch: bool = False
    pdl: bool = True
    masks: bool = False
    specialize: bool = False
    fused_add: bool = True


Config = ShrinkConfig | ExpandConfig


class Launch(NamedTuple):
    """What a launch is known by: columns are the columns in (shrink) or out (expand) of each slice.

    block_m: rows per tile of the batch's work list, None without one; item: bytes of an element of the activations.
    """

    operation: str
    tokens: int
    topk: int
    experts: int
    slots: int
    rank: int
    columns: tuple[int, ...]
    block_m: int | None
    item: int


class Chooser(Protocol):
    """Picks tiles before the defaults are asked."""

    def block_m(self, pairs: int, groups: int, rank: int) -> int | Literal[False] | None:
        """Rows per tile of the work list; None: no list; False: take the default."""

    def tiles(self, launch: Launch) -> Config | None:
        """Tiles of a launch, a ShrinkConfig for a shrink; None: take the default."""


_chooser: Chooser | None = None


def use(chooser: Chooser | None) -> None:
    """Puts a chooser in front of the defaults of this process, or takes it away (None)."""
    global _chooser
    _chooser = chooser


def chooser() -> Chooser | None:
    """What `use` put there."""
    return _chooser


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def block_r(rank: int) -> int:
    """Rank padded to what the tensor cores take."""
    return max(16, next_pow2(rank))


def work_block_m(pairs: int, groups: int, rank: int) -> int | None:
    """Rows per tile of the work list that `pairs` pairs over `groups` (slot, expert) pairs want; None: no list."""
    chosen = _chooser.block_m(pairs, groups, rank) if _chooser else False
    return default_block_m(pairs, groups, rank) if chosen is False else chosen


def default_block_m(pairs: int, groups: int, rank: int) -> int | None:
    """The default of `work_block_m`."""
    rows = pairs / max(groups, 1)
    limits = (*PAIR_LIMITS, LOW_RANK_LIMIT) if rank <= 16 else PAIR_LIMITS
    if any(pairs <= most and rows <= sharing for most, sharing in limits):
        return None
    block = 16 if rows <= 16 else 32 if rows <= 64 else 64
    return min(block, 32) if rank > 64 else block


def ladder(value: float, rungs: tuple[int, ...]) -> int:
    """The highest rung that `value` reaches by 3/4, so that a few compiled variants serve every batch size."""
    return max([r for r in rungs if value >= 0.75 * r], default=rungs[0])


def max_tiles(pairs: int, groups: int, block_m: int) -> int:
    """Tiles that `pairs` pairs can make at most."""
    return min(pairs, pairs // block_m + min(groups, pairs))


def shrink_config(
    pairs: int, groups: int, rank: int, k: int, slices: int, block_m: int | None, programs: int = PROGRAMS
) -> ShrinkConfig:
    """Default tiles of a shrink from k columns; block_m is the work list's, None without one."""
    if block_m is None:
        return ShrinkConfig("pair", 16, 1024, cdiv(k, 4096), 2, 4)
    tiles = max_tiles(pairs, groups, block_m) * slices
    # every part is read again by each of the expand's programs: few parts for many pairs
    splits = ladder(min(programs / max(tiles, 1), k / 256, 6400 / pairs), (1, 2, 4, 8))
    return ShrinkConfig("list", block_m, 64, splits, 0, 4, 5 if block_r(rank) <= 64 else 3)


def expand_config(
    pairs: int, groups: int, rank: int, n: int, slices: int, block_m: int | None, programs: int = PROGRAMS
) -> ExpandConfig:
    """Default tiles of an expand to n columns a slice; block_m is the work list's, None without one."""
    if block_m is None:
        block_n = max(16, min(128, 4096 // block_r(rank)))
        steps = ladder(pairs * slices * cdiv(n, block_n) / programs, (1, 2, 4))
        return ExpandConfig("pair", 16, block_n, steps, 4)
    if block_r(rank) > 64:
        return ExpandConfig("list", block_m, 64, min(4, cdiv(n, 64)), 4, 2)
    if block_m < 64:
        return ExpandConfig("list", block_m, 64, min(4, cdiv(n, 64)), 4, 3)
    # tiles of 64 rows and 4 warps would multiply by pipelined WGMMA with A in registers: 2 warps avoid it
    tiles = max_tiles(pairs, groups, block_m) * slices * cdiv(n, 64)
    return ExpandConfig("list", block_m, 64, ladder(min(tiles / 1000, cdiv(n, 64)), (1, 4, 15)), 2, 4)


# Elements of B that a program of expand_topk_sum holds at once: block_n columns of all of a token's experts.
MOST_TOPK_SUM = 8192


def swiglu_config(
    pairs: int, groups: int, rank: int, n: int, block_m: int | None, programs: int = PROGRAMS
) -> ExpandConfig:
    """Default tiles of expand_swiglu to n columns of gate and up together, which block_n counts too."""
    if block_m is not None:
        return expand_config(pairs, groups, rank, n, 1, block_m, programs)
    return ExpandConfig("pair", 16, max(32, min(128, 4096 // block_r(rank))), 1, 4)


def topk_sum_elements(block_n: int, topk: int, rank: int) -> int:
    """Elements of B that a program of expand_topk_sum holds at once."""
    return block_n * next_pow2(topk) * block_r(rank)


def topk_sum_config(topk: int, rank: int) -> ExpandConfig:
    """Default tiles of expand_topk_sum; always by pairs."""
    return ExpandConfig("pair", 16, max(16, min(64, MOST_TOPK_SUM // topk_sum_elements(1, topk, rank))), 1, 4)
