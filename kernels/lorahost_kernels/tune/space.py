"""Candidates: what the tuner may change, in which steps, and what it needn't try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lorahost_kernels.configs import (
    PROGRAMS,
    Config,
    ExpandConfig,
    ShrinkConfig,
    block_r,
    cdiv,
    default_block_m,
    expand_config,
    next_pow2,
    shrink_config,
    swiglu_config,
    topk_sum_config,
)
from lorahost_kernels.tuned import legal

Pair = tuple[ShrinkConfig, ExpandConfig]
# Ladders of each field; a neighbour is one rung up or down. Atomics, which sum in any order, and the prefetch of B,
# which lost wherever it was measured, are left out.
LADDERS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("shrink", "pair"): {
        "block_k": (256, 512, 1024, 2048, 4096),
        "split_k": (1, 2, 3, 4, 6, 8),
        "ranks": (1, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8),
    },
    ("shrink", "list"): {
        "block_k": (32, 64, 128, 256),
        "split_k": (1, 2, 3, 4, 6, 8, 12),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5, 6),
    },
    ("expand", "pair"): {"block_n": (32, 64, 128, 256, 512), "steps": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8)},
    ("expand", "list"): {
        "block_n": (32, 64, 128),
        "steps": (1, 2, 4, 8, 15, 30),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
        "group": (1, 4),
    },
}
# Of expands that take over the step behind them: without a work list they have no steps.
FUSED_PAIR = {"block_n": (16, 32, 64, 128, 256, 512), "num_warps": (1, 2, 4, 8)}
MOST_STEPS = 32  # steps of an unrolled loop
MOST_PARTS_BYTES = 512 * 2**20  # of the partial sums that a shrink may leave


class Space:
    """The candidates of one product: k columns in, outs columns of each slice out.

    Args:
        pairs: Rows of the batch.
        groups: (slot, expert) pairs.
        rank: Rank of the adapters.
        k: Columns in.
        outs: Columns out of each slice.
        shared_limit: Bytes of shared memory that one program may have.
        programs: Programs that fill the GPU about once.
    """

    def __init__(
        self,
        pairs: int,
        groups: int,
        rank: int,
        k: int,
        outs: tuple[int, ...],
        shared_limit: int = 227 * 1024,
        programs: int = PROGRAMS,
    ) -> None:
        self.pairs, self.groups, self.rank, self.k, self.outs = pairs, groups, rank, k, outs
        self.shared_limit, self.programs = shared_limit, programs

    def default(self, block_m: int | None) -> Pair:
        """The built-in tiles for a work list of block_m rows a tile, or for none."""
        sizes = (self.pairs, self.groups, self.rank)
        slices = len(self.outs)
        return (
            shrink_config(*sizes, self.k, slices, block_m, self.programs),
            expand_config(*sizes, self.outs[0], slices, block_m, self.programs),
        )

    def allowed(self, pair: Pair) -> bool:
        """Whether the candidate can run, and is worth compiling."""
        block_m = pair[0].block_m if pair[0].mode == "list" else None
        if any(legal.problem(c, self.rank, block_m, self.shared_limit) for c in pair):
            return False
        shrink, expand = pair
        if not all(self.fits(c) for c in pair):
            return False
        chunk = cdiv(self.k, shrink.split_k)
        steps = cdiv(chunk, shrink.block_k)
        unrolled = shrink.mode == "pair" and steps > MOST_STEPS
        # a block twice as long as what there is multiplies zeros
        wide = shrink.block_k >= 2 * next_pow2(chunk) or expand.block_n >= 2 * next_pow2(max(self.outs))
        deep = expand.steps > max(1, cdiv(max(self.outs), expand.block_n))
        many = shrink.ranks > block_r(self.rank)
        # two steps a part at least, or the copies are never ahead of their use
        thin = shrink.mode == "list" and shrink.split_k > 1 and steps < 2
        sums = self.pairs * len(self.outs) * self.rank * 4 * shrink.split_k > MOST_PARTS_BYTES
        return not (unrolled or wide or deep or many or thin or sums)

    def fits(self, config: Config) -> bool:
        """Whether a program's tile is of a size worth compiling."""
        return legal.fits_registers(config, self.rank)

    def ladders(self, half: str, config: Config) -> Mapping[str, tuple[int, ...]]:
        """The rungs of each field."""
        return LADDERS[half, config.mode]

    def neighbours(self, pair: Pair) -> Iterator[tuple[str, Pair]]:
        """(field, candidate) of every allowed step of one field."""
        for half, config in halves_of(pair):
            for name, ladder in self.ladders(half, config).items():
                for value in rungs(ladder, getattr(config, name)):
                    moved = changed(pair, half, name, value)
                    if self.allowed(moved):
                        yield f"{half}.{name}", moved


class FusedSpace(Space):
    """The candidates of a product of experts whose expand takes over the step behind it.

    topk: experts a token for down, whose expand without a work list holds B of all of them; 0 for gate_up.
    """

    def __init__(self, *sizes: Any, topk: int = 0) -> None:
        super().__init__(*sizes)
        self.topk = topk

    def default(self, block_m: int | None) -> Pair:
        """See Space."""
        shrink, expand = super().default(block_m)
        if self.topk:
            return shrink, topk_sum_config(self.topk, self.rank) if block_m is None else expand
        return shrink, swiglu_config(self.pairs, self.groups, self.rank, self.outs[0], block_m, self.programs)

    def fits(self, config: Config) -> bool:
        """See Space."""
        if isinstance(config, ShrinkConfig):
            return super().fits(config)
        if config.mode == "pair" and self.topk:
            held = legal.fits_registers(config, self.rank, next_pow2(self.topk))
            return held and not legal.topk_sum_problem(config, self.topk, self.rank)
        # narrower tiles of expand_swiglu would be rounded up
        return (self.topk > 0 or config.block_n >= 32) and super().fits(config)

    def ladders(self, half: str, config: Config) -> Mapping[str, tuple[int, ...]]:
        """See Space."""
        return FUSED_PAIR if half == "expand" and config.mode == "pair" else super().ladders(half, config)


def halves_of(pair: Pair) -> tuple[tuple[str, Config], tuple[str, Config]]:
    """The halves with their names."""
    return ("shrink", pair[0]), ("expand", pair[1])


def two_steps(space: Space, base: Pair, time: Callable[[Pair], float]) -> list[Pair]:
    """All moves of two steps: two rungs of one field, or two fields; those over a faster first step come first.

    A step of the shrink with one of the expand is left out, since their times add up, unless it splits K: the expand
    sums the parts up.
    """
    firsts = dict.fromkeys(pair for _, pair in space.neighbours(base))
    found = dict.fromkeys(pair for first in sorted(firsts, key=time) for _, pair in space.neighbours(first))
    return [
        pair
        for pair in found
        if pair != base
        and pair not in firsts
        and (pair[0] == base[0] or pair[1] == base[1] or pair[0].split_k != base[0].split_k)
    ]


def rungs(ladder: tuple[int, ...], value: int) -> list[int]:
    """The rungs next to a value, which need not be on the ladder."""
    below = [r for r in ladder if r < value]
    above = [r for r in ladder if r > value]
    return below[-1:] + above[:1]


def changed(pair: Pair, half: str, name: str, value: int) -> Pair:
    """The candidate with one field set."""
    shrink, expand = pair
    field: dict[str, Any] = {name: value}
    if half == "shrink":
        return replace(shrink, **field), expand
    return shrink, replace(expand, **field)


def merged(base: Pair, moves: list[Pair]) -> Pair:
    """All the moves, each a step of one field away from base, in one candidate."""
    shrink, expand = base
    for other_shrink, other_expand in moves:
        shrink = replace(shrink, **difference(base[0], other_shrink))
        expand = replace(expand, **difference(base[1], other_expand))
    return shrink, expand


def difference(a: Config, b: Config) -> dict[str, Any]:
    """Fields in which b differs from a."""
    return {name: value for name, value in vars(b).items() if getattr(a, name) != value}


def groupings(pairs: int, groups: int, rank: int) -> list[int | None]:
    """Ways to group the rows that are worth trying, the default first: None for no list, else rows per tile."""
    default = default_block_m(pairs, groups, rank)
    rows = pairs / max(groups, 1)
    worth: list[int | None] = [default]
    if default is not None and pairs <= 2048 and rows <= 8:
        worth.append(None)
    for block_m in legal.BLOCK_MS:
        # tiles much larger than a group are empty; much smaller ones read the weights again and again
        sensible = block_m <= max(16, 4 * rows) and block_m >= min(32, rows / 8)
        if pairs >= 32 and sensible and (block_m < 64 or block_r(rank) <= 64):
            worth.append(block_m)
    return list(dict.fromkeys(worth))
