"""The expand program: one tile of pairs times one chunk of N of one slice of B, added into the base output."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import PAIR, l2_prefetch, pdl_wait, pick, tile_rows


@triton.jit
def expand_row(
    h_row, b, y_row, weight, first_n, last_n, R, stride_bn, stride_hs, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_row[n] += weight * sum over r of h_row[r] * b[n, r] for n in [first_n, last_n), on the CUDA cores."""
    ranks = tl.arange(0, BLOCK_R)
    splits = tl.arange(0, BLOCK_S)
    hidden = tl.zeros([BLOCK_R], tl.float32)
    for step in tl.static_range(STEPS):
        cols = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = b + cols[:, None] * stride_bn + ranks[None, :]
        if EVEN_N and EVEN_R:
            w = tl.load(pointers)
        elif EVEN_N:
            w = tl.load(pointers, mask=ranks[None, :] < R, other=0.0)
        else:
            w = tl.load(pointers, mask=(cols[:, None] < last_n) & (ranks[None, :] < R), other=0.0)
        base = tl.zeros([BLOCK_N], tl.float32)
        if ADD:
            base = tl.load(y_row + cols, mask=cols < last_n, other=0.0).to(tl.float32)
        # the weights and the base output are on their way before the rank vector is known to be there
        if step == 0:
            pdl_wait(PDL)
            parts = tl.load(
                h_row + splits[:, None] * stride_hs + ranks[None, :],
                mask=(splits[:, None] < SPLITS) & (ranks[None, :] < R),
                other=0.0,
            )
            hidden = tl.sum(parts, axis=0) * weight
        acc = tl.sum(w.to(tl.float32) * hidden[None, :], axis=1) + base
        tl.store(y_row + cols, acc.to(y_row.dtype.element_ty), mask=cols < last_n)


@triton.jit
def expand_tile(
    h_rows, row_mask, b, y_rows, weights, first_n, last_n, R, stride_bn, stride_hs, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, ADD: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for BLOCK_M rows on the tensor cores; h enters as a high and a low half, so nothing is rounded off.

    With STAGES > 1 both B and the base output are copied to shared memory ahead of their use.
    """
    ranks = tl.arange(0, BLOCK_R)
    dtype = b.dtype.element_ty
    if PREFETCH:
        lines = first_n + tl.arange(0, triton.next_power_of_2(STEPS * BLOCK_N))
        l2_prefetch(b + tl.minimum(lines, last_n - 1) * stride_bn)
    pdl_wait(PDL)
    hidden = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    h_mask = row_mask[:, None] & (ranks[None, :] < R)
    for split in tl.static_range(SPLITS):
        hidden += tl.load(h_rows[:, None] + split * stride_hs + ranks[None, :], mask=h_mask, other=0.0)
    hidden = hidden * weights[:, None]
    high = hidden.to(dtype)
    low = (hidden - high.to(tl.float32)).to(dtype)
    for step in tl.range(STEPS, num_stages=STAGES):
        cols = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = b + cols[None, :] * stride_bn + ranks[:, None]
        if EVEN_N and EVEN_R:
            w = tl.load(pointers)
        elif EVEN_N:
            w = tl.load(pointers, mask=ranks[:, None] < R, other=0.0)
        else:
            w = tl.load(pointers, mask=(cols[None, :] < last_n) & (ranks[:, None] < R), other=0.0)
        y_ptrs = y_rows[:, None] + cols[None, :]
        y_mask = row_mask[:, None] if EVEN_N else row_mask[:, None] & (cols[None, :] < last_n)
        base = tl.load(y_ptrs, mask=y_mask, other=0.0) if ADD else w
        acc = tl.dot(high, w, input_precision="ieee")
        if dtype != tl.float32:
            acc = tl.dot(low, w, acc)
        if ADD:
            acc += base.to(tl.float32)
        tl.store(y_ptrs, acc.to(y_rows.dtype.element_ty), mask=y_mask)


@triton.jit
def chunk_of(pid, num_chunks, GROUP: tl.constexpr):
    """(tile, chunk): GROUP tiles take turns on one chunk of B before the next chunk is taken."""
    within = pid % (GROUP * num_chunks)
    return pid // (GROUP * num_chunks) * GROUP + within % GROUP, within // GROUP


@triton.jit
def expand_program(
    pid, y, b0, b1, b2, b3, h, topk_weights, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table,
    pair_rows, num_pairs, max_tiles, num_slots, num_experts, R,
    n0, n1, n2, n3, col0, col1, col2, col3, chunk_n, num_chunks,
    stride_ym, stride_yk, stride_bl0, stride_bl1, stride_bl2, stride_bl3, stride_be, stride_bn,
    TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_ROWS: tl.constexpr, WEIGHTED: tl.constexpr, MODE: tl.constexpr,
    SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, ADD: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, k, col + n] (+)= weight * h[pair] . b[slot, expert, n] for one tile and one chunk of columns.

    h holds SPLITS partial sums; the columns of slice i start at col_i. With HAS_ROWS y has a row for each pair, and
    that of a pair is pair_rows[pair]. Under PDL everything but h is read before
    the wait: the launch before this one is the shrink, and it waited for what came before.
    """
    tile, chunk = chunk_of(pid, num_chunks, GROUP)
    key, rows, row_mask = tile_rows(
        topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, tile, num_pairs, max_tiles,
        num_slots, num_experts, TOPK, HAS_EXPERTS, MODE, BLOCK_M,
    )  # fmt: skip
    if key >= 0:
        # slices follow each other in chunks of chunk_n columns, the last chunk of a slice may be short
        end0 = (n0 + chunk_n - 1) // chunk_n
        end1 = end0 + (n1 + chunk_n - 1) // chunk_n
        end2 = end1 + (n2 + chunk_n - 1) // chunk_n
        part = chunk * 0
        if SLICES > 1:
            part += (chunk >= end0).to(tl.int32)
        if SLICES > 2:
            part += (chunk >= end1).to(tl.int32)
        if SLICES > 3:
            part += (chunk >= end2).to(tl.int32)
        first_n = (chunk - pick(part, 0, end0, end1, end2, SLICES)) * chunk_n
        last_n = tl.minimum(first_n + chunk_n, pick(part, n0, n1, n2, n3, SLICES))
        col = pick(part, col0, col1, col2, col3, SLICES)
        slot = (key // num_experts).to(tl.int64)
        expert = (key % num_experts).to(tl.int64)
        stride_bl = pick(part, stride_bl0, stride_bl1, stride_bl2, stride_bl3, SLICES)
        b = tl.multiple_of(pick(part, b0, b1, b2, b3, SLICES), 16) + slot * stride_bl + expert * stride_be
        stride_hs = tl.cast(num_pairs, tl.int64) * SLICES * R
        if MODE == PAIR:
            weight = 1.0
            if WEIGHTED:
                weight = tl.load(topk_weights + tile).to(tl.float32)
            if HAS_ROWS:
                y_row = y + tl.load(pair_rows + tile).to(tl.int64) * stride_ym + col
            else:
                y_row = y + (tile // TOPK).to(tl.int64) * stride_ym + (tile % TOPK) * stride_yk + col
            h_row = h + (tile.to(tl.int64) * SLICES + part) * R
            expand_row(h_row, b, y_row, weight, first_n, last_n, R, stride_bn, stride_hs, SPLITS, BLOCK_S,
                       BLOCK_R, BLOCK_N, STEPS, EVEN_N, EVEN_R, ADD, PDL)  # fmt: skip
        else:
            weights = tl.full([BLOCK_M], 1.0, tl.float32)
            if WEIGHTED:
                weights = tl.load(topk_weights + rows, mask=row_mask, other=0.0).to(tl.float32)
            if HAS_ROWS:
                y_rows = y + tl.load(pair_rows + rows, mask=row_mask, other=0).to(tl.int64) * stride_ym + col
            else:
                y_rows = y + (rows // TOPK).to(tl.int64) * stride_ym + (rows % TOPK) * stride_yk + col
            h_rows = h + (rows.to(tl.int64) * SLICES + part) * R
            expand_tile(h_rows, row_mask, b, y_rows, weights, first_n, last_n, R, stride_bn, stride_hs, SPLITS,
                        BLOCK_M, BLOCK_R, BLOCK_N, STEPS, STAGES, EVEN_N, EVEN_R, ADD, PREFETCH, PDL)  # fmt: skip
    else:
        pdl_wait(PDL)
