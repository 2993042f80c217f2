"""Builds the work list that LIST kernels read; once per layer for gate_up and down, once per step for dense."""

from dataclasses import replace

import torch
from torch import Tensor

from lorahost_kernels.configs import cdiv, max_tiles, next_pow2
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.launch import has_pdl
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.ops.work_list.kernel import count_kernel, place_kernel, scan_kernel

MAX_GROUPS = 16384
BLOCK = 512
_counts: dict[torch.device, Tensor] = {}


def counts_for(device: torch.device) -> Tensor:
    """The device's group counts, zero between builds. One stream at a time."""
    if device not in _counts:
        _counts[device] = torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)
    return _counts[device]


def build_work_list(routing: Routing, num_slots: int, block_m: int, pdl: bool = True) -> Routing:
    """The routing with its work list of `block_m`-row tiles. Raises ValueError above MAX_GROUPS groups."""
    groups = num_slots * routing.num_experts
    if groups > MAX_GROUPS:
        raise ValueError(f"slots * experts = {groups} is over the work list's limit of {MAX_GROUPS}")
    pairs, device = routing.num_pairs, routing.token_slots.device
    tiles = max_tiles(pairs, groups, block_m)
    pdl = pdl and has_pdl(device)
    sizes = (4 * groups, 1 + 3 * tiles, pairs)
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    group_table, tile_table, sorted_pairs = buffer.split(sizes)
    counts = counts_for(device)
    ids = routing.token_slots if routing.topk_ids is None else routing.topk_ids
    read = (ids, routing.token_slots, routing.adapter_enabled)
    shape = {"TOPK": routing.topk, "HAS_EXPERTS": routing.topk_ids is not None, "BLOCK": BLOCK, "PDL": pdl}
    sizes_of = {"num_slots": num_slots, "num_experts": routing.num_experts}
    key = (ids.dtype, pairs, routing.topk, routing.topk_ids is None, num_slots, routing.num_experts, block_m, pdl)
    blocks, options = cdiv(pairs, BLOCK), {"launch_pdl": pdl}
    replay.launch(
        count_kernel,
        key,
        (*read, counts),
        lambda: Constants(blocks, {"num_pairs": pairs, **sizes_of, **shape}, options),
    )
    scan = {"num_groups": groups, "BLOCK_M": block_m, "BLOCK_G": max(128, next_pow2(groups)), "PDL": pdl}
    warps = {"num_warps": 8 if groups <= 2048 else 32}
    replay.launch(scan_kernel, key, (counts, group_table, tile_table), lambda: Constants(1, scan, {**warps, **options}))
    place = {"num_pairs": pairs, "max_tiles": tiles, "num_groups": groups, **sizes_of, **shape, "BLOCK_M": block_m}
    lists = (group_table, sorted_pairs, tile_table)
    replay.launch(place_kernel, key, (*read, *lists), lambda: Constants(blocks, place, options))
    return replace(routing, work=WorkList(sorted_pairs, tile_table, tiles, block_m))
