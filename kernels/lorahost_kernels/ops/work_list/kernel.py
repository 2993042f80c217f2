"""Groups (token, expert) pairs by (slot, expert) on the device: a counting sort in three launches, no syncs."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS, pair_key, pdl_wait


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=LISTS)
def count_kernel(
    topk_ids, token_slots, adapter_enabled, counts, num_pairs, num_slots, num_experts,
    TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[key] += 1 for each pair with work."""
    pdl_wait(PDL)
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = pair_key(topk_ids, token_slots, adapter_enabled, pairs, pairs < num_pairs, num_slots, num_experts,
                   TOPK, HAS_EXPERTS)  # fmt: skip
    tl.atomic_add(counts + key, 1, mask=key >= 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=LISTS)
def scan_kernel(
    counts, groups, tile_table, num_groups, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr
):
    """groups[0:4] = rows, first row, first tile and a zeroed cursor of each group; leaves counts at zero."""
    pdl_wait(PDL)
    lanes = tl.arange(0, BLOCK_G)
    inside = lanes < num_groups
    rows = tl.load(counts + lanes, mask=inside, other=0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    tl.store(groups + lanes, rows, mask=inside)
    tl.store(groups + num_groups + lanes, tl.cumsum(rows, axis=0) - rows, mask=inside)
    tl.store(groups + 2 * num_groups + lanes, tl.cumsum(tiles, axis=0) - tiles, mask=inside)
    tl.store(groups + 3 * num_groups + lanes, rows * 0, mask=inside)
    tl.store(counts + lanes, rows * 0, mask=inside)
    tl.store(tile_table, tl.sum(tiles, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"], do_not_specialize_on_alignment=LISTS)
def place_kernel(
    topk_ids, token_slots, adapter_enabled, groups, sorted_pairs, tile_table, num_pairs, max_tiles, num_groups,
    num_slots, num_experts, TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Puts each pair at its place; the pair that opens a tile writes that tile's entry of the table."""
    pdl_wait(PDL)
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = pair_key(topk_ids, token_slots, adapter_enabled, pairs, pairs < num_pairs, num_slots, num_experts,
                   TOPK, HAS_EXPERTS)  # fmt: skip
    alive = key >= 0
    rows = tl.load(groups + key, mask=alive, other=0)
    first = tl.load(groups + num_groups + key, mask=alive, other=0)
    first_tile = tl.load(groups + 2 * num_groups + key, mask=alive, other=0)
    place = tl.atomic_add(groups + 3 * num_groups + key, 1, mask=alive, sem="relaxed")
    tl.store(sorted_pairs + first + place, pairs, mask=alive)
    opens = alive & (place % BLOCK_M == 0)
    tile = 1 + first_tile + place // BLOCK_M
    tl.store(tile_table + tile, key, mask=opens)
    tl.store(tile_table + max_tiles + tile, first + place, mask=opens)
    tl.store(tile_table + 2 * max_tiles + tile, tl.minimum(rows - place, BLOCK_M), mask=opens)
