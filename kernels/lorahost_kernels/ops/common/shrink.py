"""The shrink program: one tile of pairs, some ranks and one part of K, for one slice of A."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LIST, PAIR, pdl_wait, pick, tile_rows


@triton.jit
def shrink_row(
    x_row, a, h_row, first_k, last_k, first_r, R, stride_ar, RANKS: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr, ATOMIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h_row[r] = sum over [first_k, last_k) of x_row[k] * a[r, k]: one row, RANKS ranks, on the CUDA cores."""
    ranks = first_r + tl.arange(0, RANKS)
    acc = tl.zeros([RANKS, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        cols = first_k + step * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = a + ranks[:, None] * stride_ar + cols[None, :]
        if EVEN_K and EVEN_R:
            w = tl.load(pointers)
        elif EVEN_K:
            w = tl.load(pointers, mask=ranks[:, None] < R, other=0.0)
        else:
            w = tl.load(pointers, mask=(ranks[:, None] < R) & (cols[None, :] < last_k), other=0.0)
        # the weights are on their way before the activations are known to be there
        if step == 0:
            pdl_wait(PDL)
        if EVEN_K:
            v = tl.load(x_row + cols)
        else:
            v = tl.load(x_row + cols, mask=cols < last_k, other=0.0)
        acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if ATOMIC:
        tl.atomic_add(h_row + ranks, total, mask=ranks < R, sem="relaxed")
    else:
        tl.store(h_row + ranks, total, mask=ranks < R)


@triton.jit
def shrink_tile(
    x_rows, row_mask, a, h_rows, first_k, last_k, R, stride_ar, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """The same for BLOCK_M rows (pointers to their first element) and all ranks, on the tensor cores."""
    ranks = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    a_rows = a + ranks * stride_ar
    for step in tl.range(STEPS, num_stages=STAGES):
        cols = first_k + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_ptrs = x_rows[:, None] + cols[None, :]
        a_ptrs = a_rows[None, :] + cols[:, None]
        if EVEN_K:
            v = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
        else:
            v = tl.load(x_ptrs, mask=row_mask[:, None] & (cols[None, :] < last_k), other=0.0)
        if EVEN_K and EVEN_R:
            w = tl.load(a_ptrs)
        elif EVEN_K:
            w = tl.load(a_ptrs, mask=ranks[None, :] < R, other=0.0)
        else:
            w = tl.load(a_ptrs, mask=(ranks[None, :] < R) & (cols[:, None] < last_k), other=0.0)
        acc = tl.dot(v, w, acc, input_precision="ieee")
    h_ptrs = h_rows[:, None] + ranks[None, :]
    h_mask = row_mask[:, None] & (ranks[None, :] < R)
    if ATOMIC:
        tl.atomic_add(h_ptrs, acc, mask=h_mask, sem="relaxed")
    else:
        tl.store(h_ptrs, acc, mask=h_mask)


@triton.jit
def shrink_program(
    pid, x, a0, a1, a2, a3, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table,
    pair_rows, num_pairs, max_tiles, num_slots, num_experts, K, R, chunk_k,
    stride_x, stride_al, stride_ae, stride_ar,
    TOPK: tl.constexpr, X_TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_ROWS: tl.constexpr,
    MODE: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    RANKS: tl.constexpr, RANK_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr, ATOMIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes h[split, pair, slice, ranks] (fp32) for the pairs of one tile.

    X_TOPK pairs share one row of x: TOPK where x holds tokens, 1 where it holds pairs; with HAS_ROWS the row of
    a pair is pair_rows[pair]. Under PDL the routing
    tensors of a PAIR program are read before the wait; the launch before this one must not write them.
    """
    rank_part = pid % RANK_PARTS
    split = (pid // RANK_PARTS) % SPLITS
    part = (pid // (RANK_PARTS * SPLITS)) % SLICES
    tile = pid // (RANK_PARTS * SPLITS * SLICES)
    if MODE == LIST:
        # the launch before this one may be the one that builds the list
        pdl_wait(PDL)
    key, rows, row_mask = tile_rows(
        topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, tile, num_pairs, max_tiles,
        num_slots, num_experts, TOPK, HAS_EXPERTS, MODE, BLOCK_M,
    )  # fmt: skip
    if key >= 0:
        slot = (key // num_experts).to(tl.int64)
        expert = (key % num_experts).to(tl.int64)
        a = tl.multiple_of(pick(part, a0, a1, a2, a3, SLICES), 16) + slot * stride_al + expert * stride_ae
        first_k = split * chunk_k
        last_k = tl.minimum(first_k + chunk_k, K)
        h_base = h + (split.to(tl.int64) * num_pairs * SLICES + part) * R if not ATOMIC else h + part * R
        if MODE == PAIR:
            x_index = tile // X_TOPK
            if HAS_ROWS:
                x_index = tl.load(pair_rows + tile)
            x_row = x + x_index.to(tl.int64) * stride_x
            h_row = h_base + tile.to(tl.int64) * SLICES * R
            shrink_row(x_row, a, h_row, first_k, last_k, rank_part * RANKS, R, stride_ar, RANKS, BLOCK_K,
                       STEPS, EVEN_K, EVEN_R, ATOMIC, PDL)  # fmt: skip
        else:
            x_indices = rows // X_TOPK
            if HAS_ROWS:
                x_indices = tl.load(pair_rows + rows, mask=row_mask, other=0)
            x_rows = x + x_indices.to(tl.int64) * stride_x
            h_rows = h_base + rows.to(tl.int64) * SLICES * R
            shrink_tile(x_rows, row_mask, a, h_rows, first_k, last_k, R, stride_ar, BLOCK_M, BLOCK_R, BLOCK_K,
                        STEPS, STAGES, EVEN_K, EVEN_R, ATOMIC)  # fmt: skip
    elif MODE == PAIR:
        pdl_wait(PDL)
