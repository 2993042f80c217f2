"""Torch reference of the work list: the multiset of tiles that any order of equal keys must give."""

from lorahost_kernels.ops.common.routing import Routing, pair_keys


def build_work_list(routing: Routing, num_slots: int, block_m: int) -> list[tuple[int, list[int]]]:
    """[(key, pairs of that key)] in key order; each entry is later cut into tiles of block_m."""
    if block_m < 1:
        raise ValueError(f"block_m={block_m} must be positive")
    keys = pair_keys(routing, num_slots)
    return [(k, (keys == k).nonzero().flatten().tolist()) for k in keys.unique().tolist() if k >= 0]
