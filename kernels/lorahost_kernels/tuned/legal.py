"""What a launch of given tiles needs; whoever picks tiles asks here first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from lorahost_kernels.configs import MOST_TOPK_SUM, Config, ExpandConfig, ShrinkConfig, block_r, topk_sum_elements

ConfigT = TypeVar("ConfigT", ShrinkConfig, ExpandConfig)

# Rows per tile that the kernels were checked with.
BLOCK_MS = (16, 32, 64)
# Elements that one program may hold in registers at a time, over its threads.
REGISTERS_A_THREAD = 160


def shared_bytes(config: Config, rank: int, item: int = 2) -> int:
    """Upper bound of a program's shared memory; rank of the adapters, item: bytes of an element."""
    r = block_r(rank)
    if config.mode == "pair":
        return 16 * 1024  # sums over lanes only
    stages = max(config.num_stages, 1)
    if isinstance(config, ShrinkConfig):
        return stages * config.block_k * (config.block_m + r) * item
    return (stages * config.block_n * (config.block_m + r) + config.block_m * r) * item


def problem(config: Config, rank: int, block_m: int | None, shared_limit: int, item: int = 2) -> str:
    """Why a launch can't use these tiles, or nothing.

    Args:
        config: Tiles of a shrink or an expand.
        rank: Rank of the adapters' buffers.
        block_m: Rows per tile of the work list; None without one.
        shared_limit: Bytes of shared memory that one program may have on this GPU.
        item: Bytes of an element of the activations.
    """
    if config.mode == "pair":
        if block_m is not None:
            return f"mode pair, but the batch has a work list of {block_m} rows a tile"
    elif config.block_m != block_m:
        return f"mode list of {config.block_m} rows a tile, but the batch's work list has {block_m}"
    if block_m is not None and block_m > 32 and block_r(rank) > 64:
        return f"rank {rank} takes tiles of 32 rows at most, not {block_m}"
    need = shared_bytes(config, rank, item)
    if need > shared_limit:
        return f"needs up to {need} bytes of shared memory of {shared_limit}"
    return unsafe(config)


def unsafe(config: Config) -> str:
    """Why no GPU should run these tiles, or nothing."""
    if config.mode == "list" and config.block_m not in BLOCK_MS:
        return f"block_m={config.block_m} is none of {BLOCK_MS}"
    # ptxas before 13.3 reorders register operands of pipelined WGMMA, which 4 warps on 64 rows would use
    if config.mode == "list" and not isinstance(config, ShrinkConfig) and config.block_m >= 64 and config.num_warps > 2:
        return f"an expand of {config.block_m} rows a tile must have at most 2 warps, has {config.num_warps}"
    return ""


def topk_sum_problem(config: Config, topk: int, rank: int) -> str:
    """Why expand_topk_sum can't use these tiles, or nothing; the smallest block_n is always allowed."""
    if isinstance(config, ShrinkConfig) or config.mode != "pair":
        return f"takes tiles of mode pair, got mode {config.mode}"
    held = topk_sum_elements(config.block_n, topk, rank)
    if config.block_n > 16 and held > MOST_TOPK_SUM:
        return f"block_n={config.block_n} for {topk} experts a token holds {held} elements of {MOST_TOPK_SUM} at once"
    return ""


def fits_registers(config: Config, rank: int, copies: int = 1) -> bool:
    """Whether the tile that a program holds at once is of a size worth compiling; copies: such tiles at once."""
    threads, r = 32 * config.num_warps, block_r(rank)
    if isinstance(config, ShrinkConfig):
        held = min(config.ranks or r, r) * config.block_k if config.mode == "pair" else config.block_m * r
    else:
        held = config.block_n * r if config.mode == "pair" else config.block_m * (config.block_n + 2 * r)
    return 2 * threads <= held * copies <= REGISTERS_A_THREAD * threads


def fitted(config: ConfigT, rank: int, shared_limit: int, item: int = 2) -> ConfigT:
    """The tiles, with as few stages and then as narrow as the shared memory asks for."""
    width = "block_k" if isinstance(config, ShrinkConfig) else "block_n"
    while shared_bytes(config, rank, item) > shared_limit:
        name = "num_stages" if config.num_stages > 1 else width
        value = getattr(config, name)
        if name == width and value <= 16:
            break
        smaller: dict[str, Any] = {name: value // 2 if name == width else value - 1}
        config = replace(config, **smaller)
    return config
