"""Triton kernel of gate_up_expand; the body is ops.common.expand."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS
from lorahost_kernels.ops.common.expand import expand_program


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"], do_not_specialize_on_alignment=LISTS)
def gate_up_expand_kernel(
    y, b0, b1, b2, b3, h, topk_weights, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table,
    pair_rows, num_pairs, max_tiles, num_slots, num_experts, R, n0, n1, n2, n3, col0, col1, col2, col3, chunk_n,
    num_chunks, stride_ym, stride_yk, stride_bl0, stride_bl1, stride_bl2, stride_bl3, stride_be, stride_bn,
    TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_ROWS: tl.constexpr, WEIGHTED: tl.constexpr, MODE: tl.constexpr,
    SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, ADD: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, k, column + n] (+)= h[pair, slice] . B[slot, expert, n], gate and up."""
    expand_program(
        tl.program_id(0), y, b0, b1, b2, b3, h, topk_weights, topk_ids, token_slots, adapter_enabled,
        sorted_pairs, tile_table, pair_rows, num_pairs, max_tiles, num_slots, num_experts, R, n0, n1, n2, n3, col0,
        col1, col2, col3, chunk_n, num_chunks, stride_ym, stride_yk, stride_bl0, stride_bl1, stride_bl2,
        stride_bl3, stride_be, stride_bn, TOPK, HAS_EXPERTS, HAS_ROWS, WEIGHTED, MODE, SLICES, SPLITS, BLOCK_S,
        BLOCK_M, BLOCK_R, BLOCK_N, STEPS, STAGES, GROUP, EVEN_N, EVEN_R, ADD, PREFETCH, PDL,
    )  # fmt: skip
