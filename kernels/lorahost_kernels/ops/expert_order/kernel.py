"""Orders the (token, expert) pairs of a batch by expert: one program for a few, else three launches."""

import triton
import triton.language as tl

POINTERS = ["topk_ids", "topk_weights", "row_pairs", "pair_rows", "row_weights", "counts", "next_row"]


@triton.jit
def one_hot(topk_ids, start, num_pairs, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """(pairs, int32 (CHUNK, BLOCK_E) of zeros and ones): which expert each pair goes to, none for -1."""
    pairs = start + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
    return pairs, (expert[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)


@triton.jit
def write_tables(
    expert_rows, first_row, first_tile, tile_map, rows, max_tiles, num_experts, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Writes the tables that depend on the rows of each expert alone; returns the first row of each."""
    experts = tl.arange(0, BLOCK_E)
    inside = experts < num_experts
    first = tl.cumsum(rows, axis=0) - rows
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    tile_starts = tile_ends - tiles
    tl.store(expert_rows + experts, rows, mask=inside)
    tl.store(first_row + experts, first, mask=inside)
    tl.store(first_row + num_experts, tl.sum(rows, axis=0))
    tl.store(first_tile + experts, tile_starts, mask=inside)
    tl.store(first_tile + num_experts, tl.sum(tiles, axis=0))
    for start in range(0, max_tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        mine = (tile[:, None] >= tile_starts[None, :]) & (tile[:, None] < tile_ends[None, :])
        entry = ((tile[:, None] - tile_starts[None, :]) << 16) + experts[None, :]
        found = tl.sum(mine.to(tl.int32), axis=1) > 0
        entry = tl.where(found, tl.sum(tl.where(mine, entry, 0), axis=1), -1)
        tl.store(tile_map + tile, entry, mask=tile < max_tiles)
    return first


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"], do_not_specialize_on_alignment=POINTERS)
def order_kernel(
    topk_ids, topk_weights, expert_rows, first_row, first_tile, tile_map, row_pairs, pair_rows, row_weights,
    num_pairs, max_tiles, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """All tables of ops.expert_order.launch in one program; stable, so one batch always gives one order."""
    rows = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        _, hot = one_hot(topk_ids, start, num_pairs, BLOCK_E, CHUNK)
        rows += tl.sum(hot, axis=0)
    total = tl.sum(rows, axis=0)
    first = write_tables(expert_rows, first_row, first_tile, tile_map, rows, max_tiles, num_experts, BLOCK_M, BLOCK_E,
                         BLOCK_T)  # fmt: skip
    for start in range(0, num_pairs, CHUNK):
        pairs, hot = one_hot(topk_ids, start, num_pairs, BLOCK_E, CHUNK)
        before = tl.cumsum(hot, axis=0) - hot
        routed = (tl.sum(hot, axis=1) > 0) & (pairs < num_pairs)
        row = tl.sum(hot * (first[None, :] + before), axis=1)
        weight = tl.load(topk_weights + pairs, mask=routed, other=0.0)
        tl.store(pair_rows + pairs, tl.where(routed, row, -1), mask=pairs < num_pairs)
        tl.store(row_pairs + row, pairs, mask=routed)
        # rows that no pair takes
        tl.store(row_pairs + pairs, pairs * 0 - 1, mask=(pairs >= total) & (pairs < num_pairs))
        tl.store(row_weights + row, weight.to(row_weights.dtype.element_ty), mask=routed)
        first += tl.sum(hot, axis=0)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=POINTERS)
def count_kernel(topk_ids, counts, num_pairs, num_experts, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """counts[expert] += its pairs; one addition an expert and program, since all programs meet at these few words."""
    _, hot = one_hot(topk_ids, tl.program_id(0) * BLOCK, num_pairs, BLOCK_E, BLOCK)
    experts, rows = tl.arange(0, BLOCK_E), tl.sum(hot, axis=0)
    tl.atomic_add(counts + experts, rows, mask=(rows > 0) & (experts < num_experts), sem="relaxed")


@triton.jit(do_not_specialize=["max_tiles"], do_not_specialize_on_alignment=POINTERS)
def scan_kernel(
    counts, next_row, expert_rows, first_row, first_tile, tile_map, max_tiles, num_experts, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Tables from the counts; next_row starts at each expert's first row; leaves the counts at zero."""
    experts = tl.arange(0, BLOCK_E)
    inside = experts < num_experts
    rows = tl.load(counts + experts, mask=inside, other=0)
    first = write_tables(expert_rows, first_row, first_tile, tile_map, rows, max_tiles, num_experts, BLOCK_M, BLOCK_E,
                         BLOCK_T)  # fmt: skip
    tl.store(next_row + experts, first, mask=inside)
    tl.store(counts + experts, rows * 0, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=POINTERS)
def place_kernel(
    topk_ids, topk_weights, next_row, first_row, row_pairs, pair_rows, row_weights, num_pairs, num_experts,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for each pair; the order of the programs' rows within an expert differs from run to run, no value does."""
    pairs, hot = one_hot(topk_ids, tl.program_id(0) * BLOCK, num_pairs, BLOCK_E, BLOCK)
    experts, rows = tl.arange(0, BLOCK_E), tl.sum(hot, axis=0)
    hot = tl.where(experts[None, :] < num_experts, hot, 0)
    mine = tl.atomic_add(next_row + experts, rows, mask=(rows > 0) & (experts < num_experts), sem="relaxed")
    inside = pairs < num_pairs
    routed = inside & (tl.sum(hot, axis=1) > 0)
    row = tl.sum(hot * (tl.where(rows > 0, mine, 0)[None, :] + tl.cumsum(hot, axis=0) - hot), axis=1)
    weight = tl.load(topk_weights + pairs, mask=routed, other=0.0)
    tl.store(pair_rows + pairs, tl.where(routed, row, -1), mask=inside)
    tl.store(row_pairs + row, pairs, mask=routed)
    tl.store(row_weights + row, weight.to(row_weights.dtype.element_ty), mask=routed)
    total = tl.load(first_row + num_experts)
    tl.store(row_pairs + pairs, pairs * 0 - 1, mask=inside & (pairs >= total))
