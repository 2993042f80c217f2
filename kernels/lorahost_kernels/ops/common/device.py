"""Device functions that every operation is made of: which rows a program owns, one shrink tile, one expand tile.

A "pair" is one (token, top-k slot) of the batch, numbered `token * TOPK + k`; a dense layer is a MoE of one
expert and top-1. A "tile" is up to BLOCK_M pairs that share one adapter slot and one expert.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# How a program finds its rows.
PAIR = tl.constexpr(0)  # tile i is pair i alone: no grouping, nothing to build
SCAN = tl.constexpr(1)  # every program scans all keys; the first pair of a group speaks for BLOCK_M of them
LIST = tl.constexpr(2)  # tiles come from the work list that ops.work_list built

# index tensors may start anywhere: their alignment must not cost another compilation
LISTS = (
    "topk_ids",
    "token_slots",
    "adapter_enabled",
    "sorted_pairs",
    "tile_table",
    "topk_weights",
    "groups",
    "counts",
)


@triton.jit
def pair_key(topk_ids, token_slots, adapter_enabled, pair, inside, num_slots, num_experts, TOPK, HAS_EXPERTS):
    """slot * num_experts + expert of each pair; -1 where the pair has no LoRA work.

    No work: base rows (-1), padded rows with a stale slot (>= num_slots), expert -1, disabled adapters.
    """
    slot = tl.load(token_slots + pair // TOPK, mask=inside, other=-1).to(tl.int32)
    alive = inside & (slot >= 0) & (slot < num_slots)
    expert = slot * 0
    if HAS_EXPERTS:
        expert = tl.load(topk_ids + pair, mask=inside, other=-1).to(tl.int32)
        alive = alive & (expert >= 0) & (expert < num_experts)
    enabled = tl.load(adapter_enabled + slot, mask=alive, other=0)
    return tl.where(alive & (enabled != 0), slot * num_experts + expert, -1)


@triton.jit
def scan_rows(
    topk_ids,
    token_slots,
    adapter_enabled,
    tile,
    num_pairs,
    num_slots,
    num_experts,
    TOPK: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """(key, rows[BLOCK_M], row_mask) of the group that pair `tile` leads; key -1 when it leads none."""
    pairs = tl.arange(0, BLOCK_P)
    keys = pair_key(
        topk_ids,
        token_slots,
        adapter_enabled,
        pairs,
        pairs < num_pairs,
        num_slots,
        num_experts,
        TOPK,
        HAS_EXPERTS,
    )
    key = tl.max(tl.where(pairs == tile, keys, -1), axis=0)
    same = (keys == key) & (key >= 0)
    before = tl.sum((same & (pairs < tile)).to(tl.int32), axis=0)
    order = tl.cumsum(same.to(tl.int32), axis=0) - 1 - before
    member = same & (order >= 0) & (order < BLOCK_M)
    lanes = tl.arange(0, BLOCK_M)
    hit = member[None, :] & (order[None, :] == lanes[:, None])
    rows = tl.sum(tl.where(hit, pairs[None, :], 0), axis=1)
    count = tl.sum(member.to(tl.int32), axis=0)
    leads = (key >= 0) & (before % BLOCK_M == 0)
    return tl.where(leads, key, -1), rows, lanes < count


@triton.jit
def tile_rows(
    topk_ids,
    token_slots,
    adapter_enabled,
    sorted_pairs,
    tile_table,
    tile,
    num_pairs,
    max_tiles,
    num_slots,
    num_experts,
    TOPK: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """(key, rows[BLOCK_M], row_mask[BLOCK_M]) of one tile; key is -1 where there is nothing to do."""
    if MODE == PAIR:
        key = pair_key(
            topk_ids,
            token_slots,
            adapter_enabled,
            tile,
            tile < num_pairs,
            num_slots,
            num_experts,
            TOPK,
            HAS_EXPERTS,
        )
        lanes = tl.arange(0, BLOCK_M)
        rows = tile + lanes * 0
        row_mask = lanes == 0
    elif MODE == SCAN:
        key, rows, row_mask = scan_rows(
            topk_ids,
            token_slots,
            adapter_enabled,
            tile,
            num_pairs,
            num_slots,
            num_experts,
            TOPK,
            HAS_EXPERTS,
            BLOCK_M,
            BLOCK_P,
        )
    else:
        # tile_table: [num_tiles, key per tile, first sorted position per tile, rows per tile]
        inside = tile < tl.load(tile_table)
        key = tl.load(tile_table + 1 + tile, mask=inside, other=-1)
        first = tl.load(tile_table + 1 + max_tiles + tile, mask=inside, other=0)
        count = tl.load(tile_table + 1 + 2 * max_tiles + tile, mask=inside, other=0)
        lanes = tl.arange(0, BLOCK_M)
        row_mask = lanes < count
        rows = tl.load(sorted_pairs + first + lanes, mask=row_mask, other=0)
    return key, rows, row_mask


@triton.jit
def pick(index, v0, v1, v2, v3, COUNT: tl.constexpr):
    """The index-th of COUNT (1 to 4) values."""
    out = v0
    if COUNT > 1:
        out = tl.where(index == 1, v1, out)
    if COUNT > 2:
        out = tl.where(index == 2, v2, out)
    if COUNT > 3:
        out = tl.where(index == 3, v3, out)
    return out


@triton.jit
def l2_prefetch(pointers):
    """Asks for the lines that the pointers lie in, without waiting and without registers to hold them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(b, num_elements, share, SHARES: tl.constexpr):
    """Asks for the share-th of SHARES parts of a contiguous matrix, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // b.dtype.element_ty.primitive_bitwidth
    lines = (num_elements + LINE - 1) // LINE
    per_share = (lines + SHARES - 1) // SHARES
    first = share * per_share
    last = tl.minimum(first + per_share, lines) - 1
    for line in range(first, last + 1, 128):
        l2_prefetch(b + tl.minimum(line + tl.arange(0, 128), last) * LINE)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Waits for the launch before this one, then lets the next one start its own loads of weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def arrive(counter):
    """One shrink program of a tile is done: its stores are visible to whoever sees the count."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def await_arrivals(counter, arrivals, departures):
    """Spins until `arrivals` programs arrived; the last of `departures` to come through resets the counter."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == arrivals + departures - 1:
        tl.store(counter, 0)
