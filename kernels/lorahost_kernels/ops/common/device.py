"""Device functions that every operation uses: which rows a program owns, which slice, and waiting for a launch.

A "pair" is one (token, top-k entry) of the batch, numbered `token * TOPK + k`; a dense layer is a MoE of one
expert and top-1. A "tile" is up to BLOCK_M pairs that share one adapter slot and one expert.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# How a program finds its rows.
PAIR = tl.constexpr(0)  # tile i is pair i alone: no grouping, nothing to build
LIST = tl.constexpr(1)  # tiles come from the work list that ops.work_list built

# index tensors may start anywhere: their alignment must not cost another compilation
LISTS = (
    "topk_ids",
    "token_slots",
    "adapter_enabled",
    "sorted_pairs",
    "tile_table",
    "topk_weights",
    "pair_rows",
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
def tile_rows(
    topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, tile, num_pairs, max_tiles, num_slots,
    num_experts, TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, MODE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(key, rows[BLOCK_M], row_mask[BLOCK_M]) of one tile; key is -1 where there is nothing to do."""
    lanes = tl.arange(0, BLOCK_M)
    if MODE == PAIR:
        key = pair_key(topk_ids, token_slots, adapter_enabled, tile, tile < num_pairs, num_slots, num_experts,
                       TOPK, HAS_EXPERTS)  # fmt: skip
        rows = tile + lanes * 0
        row_mask = lanes == 0
    else:
        # tile_table: [number of tiles, key of each tile, its first place in sorted_pairs, its rows]
        inside = tile < tl.load(tile_table)
        key = tl.load(tile_table + 1 + tile, mask=inside, other=-1)
        # one list serves many dense modules, and not every adapter has weights for each
        enabled = tl.load(adapter_enabled + key // num_experts, mask=inside, other=0)
        key = tl.where(enabled != 0, key, -1)
        first = tl.load(tile_table + 1 + max_tiles + tile, mask=inside, other=0)
        count = tl.load(tile_table + 1 + 2 * max_tiles + tile, mask=inside, other=0)
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
def pdl_wait(PDL: tl.constexpr):
    """Waits for the launch before this one, then lets the next one start its own loads of weights.

    In this order, whatever was complete before the launch before this one is complete for the next one too.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
