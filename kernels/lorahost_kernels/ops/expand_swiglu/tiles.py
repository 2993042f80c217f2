"""What the programs of expand_swiglu's list kernel do: a tile of the work list, or pairs that no tile has."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LIST, l2_prefetch, pair_key, pdl_wait, tile_rows
from lorahost_kernels.ops.common.expand import chunk_of


@triton.jit
def swiglu(both, alpha, limit):
    """gate * sigmoid(alpha * gate) * (up + 1) of the clamped values, fp32; both: [..., columns, 2], gate then up.

    Neighbouring columns are in one thread, also behind a product on the tensor cores, so nothing moves for the split.
    """
    gate, up = tl.split(both)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def base_rows(
    out, y, topk_ids, token_slots, adapter_enabled, pair_rows, block, num_pairs, num_slots, num_experts, N, stride_om,
    stride_ym, alpha, limit, TOPK: tl.constexpr, BLOCK_P: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = swiglu(y[row]) for those of BLOCK_P pairs that have a row but no LoRA work, four rows at a time.

    Without such pairs a program ends at once and doesn't wait: the tiles' programs of the same launch do.
    """
    ROWS: tl.constexpr = 4
    pairs = block * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = pairs < num_pairs
    key = pair_key(topk_ids, token_slots, adapter_enabled, pairs, inside, num_slots, num_experts, TOPK, True)
    row = tl.load(pair_rows + pairs, mask=inside, other=-1)
    base = ((key < 0) & (row >= 0)).to(tl.int32)
    count = tl.sum(base, axis=0)
    if count > 0:
        pdl_wait(PDL)
        place = tl.where(base != 0, tl.cumsum(base, axis=0) - 1, -1)
        lanes = tl.arange(0, ROWS)
        for first in range(0, count, ROWS):
            own = tl.sum(tl.where(place[None, :] == first + lanes[:, None], row[None, :], 0), axis=1).to(tl.int64)
            for col in range(0, N, COLS):
                taken = (first + lanes < count)[:, None]
                cols = 2 * col + tl.arange(0, 2 * COLS)
                both = tl.load(y + own[:, None] * stride_ym + cols[None, :], mask=taken & (cols < 2 * N)[None, :],
                               other=0.0)  # fmt: skip
                value = swiglu(tl.reshape(both.to(tl.float32), [ROWS, COLS, 2]), alpha, limit)
                outs = col + tl.arange(0, COLS)
                tl.store(out + own[:, None] * stride_om + outs[None, :], value.to(out.dtype.element_ty),
                         mask=taken & (outs < N)[None, :])  # fmt: skip


@triton.jit
def work_tile(
    out, y, b, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, pair_rows, pid, num_pairs,
    max_tiles, num_slots, num_experts, R, N, chunk_n, num_chunks, stride_om, stride_ym, stride_bl, stride_be,
    stride_bn, alpha, limit, TOPK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_R: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile and one chunk of columns; all that finds the rows is read before the wait, as in ops.common.expand."""
    tile, chunk = chunk_of(pid, num_chunks, GROUP)
    key, pairs, mask = tile_rows(topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, tile, num_pairs,
                                 max_tiles, num_slots, num_experts, TOPK, True, LIST, BLOCK_M)  # fmt: skip
    if key >= 0:
        rows = tl.load(pair_rows + pairs, mask=mask, other=-1).to(tl.int64)
        weights = b + (key // num_experts).to(tl.int64) * stride_bl + (key % num_experts).to(tl.int64) * stride_be
        first_n = chunk * chunk_n
        swiglu_tile(
            out + rows * stride_om, y + rows * stride_ym, rows >= 0, tl.multiple_of(weights, 16),
            h + pairs.to(tl.int64) * R, first_n, tl.minimum(first_n + chunk_n, N), R, stride_bn,
            tl.cast(num_pairs, tl.int64) * R, alpha, limit, SPLITS, BLOCK_M, BLOCK_R, BLOCK_N, STEPS, STAGES, EVEN_N,
            EVEN_R, PREFETCH, PDL,
        )  # fmt: skip
    else:
        pdl_wait(PDL)


@triton.jit
def swiglu_tile(
    out_rows, y_rows, row_mask, b, h_rows, first_n, last_n, R, stride_bn, stride_hs, alpha, limit,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As expand_tile of ops.common.expand: h as a high and a low half, B and y through shared memory.

    first_n, last_n and BLOCK_N count columns of out, of which y and B have twice as many.
    """
    ranks = tl.arange(0, BLOCK_R)
    dtype = b.dtype.element_ty
    if PREFETCH:
        lines = 2 * first_n + tl.arange(0, triton.next_power_of_2(2 * STEPS * BLOCK_N))
        l2_prefetch(b + tl.minimum(lines, 2 * last_n - 1) * stride_bn)
    pdl_wait(PDL)
    hidden = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    h_mask = row_mask[:, None] & (ranks[None, :] < R)
    for split in tl.static_range(SPLITS):
        hidden += tl.load(h_rows[:, None] + split * stride_hs + ranks[None, :], mask=h_mask, other=0.0)
    high = hidden.to(dtype)
    low = (hidden - high.to(tl.float32)).to(dtype)
    for step in tl.range(STEPS, num_stages=STAGES):
        outs = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
        cols = 2 * (first_n + step * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        pointers = b + cols[None, :] * stride_bn + ranks[:, None]
        if EVEN_N and EVEN_R:
            w = tl.load(pointers)
        else:
            w = tl.load(pointers, mask=(cols[None, :] < 2 * last_n) & (ranks[:, None] < R), other=0.0)
        y_mask = row_mask[:, None] if EVEN_N else row_mask[:, None] & (cols[None, :] < 2 * last_n)
        base = tl.load(y_rows[:, None] + cols[None, :], mask=y_mask, other=0.0)
        acc = tl.dot(high, w, input_precision="ieee")
        if dtype != tl.float32:
            acc = tl.dot(low, w, acc)
        value = swiglu(tl.reshape(acc + base.to(tl.float32), [BLOCK_M, BLOCK_N, 2]), alpha, limit)
        out_mask = row_mask[:, None] if EVEN_N else row_mask[:, None] & (outs[None, :] < last_n)
        tl.store(out_rows[:, None] + outs[None, :], value.to(out_rows.dtype.element_ty), mask=out_mask)
