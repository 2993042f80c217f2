"""Triton kernels of expand_swiglu: gate_up_expand and the activation behind it in one launch, by pairs or by tiles."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS, pair_key, pdl_wait
from lorahost_kernels.ops.expand_swiglu.tiles import base_rows, swiglu, work_tile


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=LISTS)
def expand_swiglu_kernel(
    out, y, b, h, topk_ids, token_slots, adapter_enabled, pair_rows, num_pairs, num_slots, num_experts, R, N,
    num_chunks, stride_om, stride_ym, stride_bl, stride_be, stride_bn, alpha, limit,
    TOPK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = swiglu(y[row] + h[pair] . B[slot, expert]) for every pair, adapter or not; columns are interleaved.

    Under PDL all but h is read before the wait: the launch before this one is the shrink, which waited for y.
    """
    pid = tl.program_id(0)
    pair, chunk = pid // num_chunks, pid % num_chunks
    key = pair_key(topk_ids, token_slots, adapter_enabled, pair, pair < num_pairs, num_slots, num_experts, TOPK, True)
    row = tl.load(pair_rows + pair).to(tl.int64)
    cols = chunk * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    mask = (cols < 2 * N) & (row >= 0)
    acc = tl.load(y + row * stride_ym + cols, mask=mask, other=0.0).to(tl.float32)
    if key >= 0:
        ranks = tl.arange(0, BLOCK_R)
        weights = b + (key // num_experts).to(tl.int64) * stride_bl + (key % num_experts).to(tl.int64) * stride_be
        pointers = weights + cols[:, None] * stride_bn + ranks[None, :]
        if EVEN_N and EVEN_R:
            w = tl.load(pointers)
        else:
            w = tl.load(pointers, mask=(cols[:, None] < 2 * N) & (ranks[None, :] < R), other=0.0)
        pdl_wait(PDL)
        splits = tl.arange(0, BLOCK_S)
        parts = tl.load(
            h + splits[:, None] * tl.cast(num_pairs, tl.int64) * R + pair.to(tl.int64) * R + ranks[None, :],
            mask=(splits[:, None] < SPLITS) & (ranks[None, :] < R),
            other=0.0,
        )
        acc += tl.sum(w.to(tl.float32) * tl.sum(parts, axis=0)[None, :], axis=1)
    else:
        pdl_wait(PDL)
    value = swiglu(tl.reshape(acc, [BLOCK_N, 2]), alpha, limit)
    outs = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + row * stride_om + outs, value.to(out.dtype.element_ty), mask=(outs < N) & (row >= 0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "base_blocks"], do_not_specialize_on_alignment=LISTS)
def expand_swiglu_list_kernel(
    out, y, b, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, pair_rows, num_pairs, max_tiles,
    base_blocks, num_slots, num_experts, R, N, chunk_n, num_chunks, stride_om, stride_ym, stride_bl, stride_be,
    stride_bn, alpha, limit,
    TOPK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, BASE_COLS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for the tiles of a work list and, in the grid's first programs, for the pairs that are in none."""
    pid = tl.program_id(0)
    if pid < base_blocks:
        base_rows(out, y, topk_ids, token_slots, adapter_enabled, pair_rows, pid, num_pairs, num_slots, num_experts,
                  N, stride_om, stride_ym, alpha, limit, TOPK, BLOCK_P, BASE_COLS, PDL)  # fmt: skip
    else:
        work_tile(out, y, b, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, pair_rows,
                  pid - base_blocks, num_pairs, max_tiles, num_slots, num_experts, R, N, chunk_n, num_chunks,
                  stride_om, stride_ym, stride_bl, stride_be, stride_bn, alpha, limit, TOPK, SPLITS, BLOCK_M, BLOCK_R,
                  BLOCK_N, STEPS, STAGES, GROUP, EVEN_N, EVEN_R, PREFETCH, PDL)  # fmt: skip
