"""Launcher of expert_order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lorahost_kernels.configs import cdiv, next_pow2
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.expert_order.kernel import count_kernel, order_kernel, place_kernel, scan_kernel
from lorahost_kernels.ops.work_list.launch import counts_for

# pairs up to which one program is faster than three launches
ONE_PROGRAM = 512
MAX_EXPERTS = 1024


@dataclass(frozen=True)
class ExpertOrder:
    """Pairs ordered by expert; all int32 on the device, rows in [0, pairs) of the expert-sorted buffers.

    expert_rows: (experts,) rows of each expert. first_row, first_tile: (experts + 1,) where each expert's rows and
    tiles of block_m rows start. tile_map: (max_tiles,) `tile within its expert << 16 | expert`, -1 where unused.
    row_pairs: (pairs,) pair of each row, -1 behind the last. pair_rows: (pairs,) row of each pair, -1 for expert -1.
    row_weights: (pairs,) top-k weight of each row's pair, in the given dtype.
    """

    expert_rows: Tensor
    first_row: Tensor
    first_tile: Tensor
    tile_map: Tensor
    row_pairs: Tensor
    pair_rows: Tensor
    row_weights: Tensor
    block_m: int


def count_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles that `pairs` pairs can make at most when each expert starts a new one."""
    return pairs if pairs <= experts else cdiv(pairs - experts + 1, block_m) + experts - 1


def expert_order(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int, block_m: int, dtype: torch.dtype
) -> ExpertOrder:
    """The order of topk_ids (tokens, topk), contiguous int; entries outside [0, num_experts) are left out.

    Raises:
        ValueError: more than MAX_EXPERTS experts, or arguments that are not contiguous.
    """
    pairs, device = topk_ids.numel(), topk_ids.device
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"expert_order takes at most {MAX_EXPERTS} experts, got {num_experts}")
    if not topk_ids.is_contiguous() or not topk_weights.is_contiguous():
        raise ValueError("topk_ids and topk_weights must be contiguous")
    tiles = max(count_tiles(pairs, num_experts, block_m), 1)
    # each table starts at 16 bytes: the base GEMM's own variants depend on it
    sizes = [cdiv(n, 4) * 4 for n in (num_experts, num_experts + 1, num_experts + 1, tiles, pairs, pairs, num_experts)]
    a, b, c, d, e, f, next_row = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    tables = (a[:num_experts], b[: num_experts + 1], c[: num_experts + 1], d[:tiles])
    order = ExpertOrder(*tables, e[:pairs], f[:pairs], torch.empty(pairs, dtype=dtype, device=device), block_m)
    if pairs <= ONE_PROGRAM:
        one_launch(order, topk_ids, topk_weights, num_experts, tiles)
    else:
        three_launches(order, topk_ids, topk_weights, num_experts, tiles, next_row)
    return order


def one_launch(order: ExpertOrder, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, tiles: int) -> None:
    """For few pairs; the time grows with them."""
    pairs = topk_ids.numel()

    def constants() -> Constants:
        args = {"num_pairs": pairs, "max_tiles": tiles, "num_experts": num_experts, "BLOCK_M": order.block_m}
        args |= {"BLOCK_E": max(16, next_pow2(num_experts)), "BLOCK_T": 64, "CHUNK": max(16, min(64, next_pow2(pairs)))}
        return Constants(1, args, {"num_warps": 4})

    key = (topk_ids.dtype, topk_weights.dtype, order.row_weights.dtype, pairs, num_experts, order.block_m)
    tables = (order.expert_rows, order.first_row, order.first_tile, order.tile_map, order.row_pairs, order.pair_rows)
    replay.launch(order_kernel, key, (topk_ids, topk_weights, *tables, order.row_weights), constants)


def three_launches(
    order: ExpertOrder, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, tiles: int, next_row: Tensor
) -> None:
    """Count, scan, place: for any number of pairs."""
    pairs, counts = topk_ids.numel(), counts_for(topk_ids.device)
    block_e = max(16, next_pow2(num_experts))
    block = max(16, min(128, 4096 // block_e))
    blocks = cdiv(pairs, block)
    both = {"num_pairs": pairs, "num_experts": num_experts, "BLOCK_E": block_e, "BLOCK": block}
    scan = {"max_tiles": tiles, "num_experts": num_experts, "BLOCK_M": order.block_m, "BLOCK_E": block_e, "BLOCK_T": 64}
    key = (topk_ids.dtype, topk_weights.dtype, order.row_weights.dtype, pairs, num_experts, order.block_m)
    replay.launch(count_kernel, key, (topk_ids, counts), lambda: Constants(blocks, both, {}))
    tables = (order.expert_rows, order.first_row, order.first_tile, order.tile_map)
    replay.launch(scan_kernel, key, (counts, next_row, *tables), lambda: Constants(1, scan, {"num_warps": 4}))
    rows = (next_row, order.first_row, order.row_pairs, order.pair_rows, order.row_weights)
    replay.launch(place_kernel, key, (topk_ids, topk_weights, *rows), lambda: Constants(blocks, both, {}))
