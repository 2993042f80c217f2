"""Triton kernel of linear: shrink and expand in one launch.

Programs start in the order of their ids, and shrink programs wait for nobody, so the wait always ends.
"""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS, arrive
from lorahost_kernels.ops.common.expand import expand_program
from lorahost_kernels.ops.common.shrink import shrink_program


@triton.jit(
    do_not_specialize=["num_pairs", "max_tiles", "total_shrink"], do_not_specialize_on_alignment=LISTS
)
def linear_kernel(
    y, x, a0, a1, a2, a3, b0, b1, b2, b3, h, topk_weights, topk_ids, token_slots, adapter_enabled,
    sorted_pairs, tile_table, counters, num_pairs, max_tiles, num_slots, num_experts, total_shrink, K, R,
    chunk_k, stride_x, stride_al, stride_ae, stride_ar, n0, n1, n2, n3, col0, col1, col2, col3, chunk_n,
    num_chunks, stride_ym, stride_yk, stride_bl0, stride_bl1, stride_bl2, stride_bl3, stride_be, stride_bn,
    TOPK: tl.constexpr, X_TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, MODE: tl.constexpr,
    SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    RANKS: tl.constexpr, RANK_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_P: tl.constexpr, EVEN_K: tl.constexpr, EVEN_RANKS: tl.constexpr,
    ATOMIC: tl.constexpr, PREFETCH: tl.constexpr, PREFETCH_B: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, E_STEPS: tl.constexpr, E_STAGES: tl.constexpr,
    GROUP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shrink and expand in one launch: the first total_shrink programs shrink."""
    pid = tl.program_id(0)
    if pid < total_shrink:
        tile, part, key = shrink_program(
            pid, x, a0, a1, a2, a3, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table,
            num_pairs, max_tiles, num_slots, num_experts, K, R, chunk_k, stride_x, stride_al, stride_ae,
            stride_ar, b0, b1, b2, b3, n0, n1, n2, n3, stride_bl0, stride_bl1, stride_bl2, stride_bl3,
            stride_be, TOPK, X_TOPK, HAS_EXPERTS, MODE, SLICES, SPLITS, BLOCK_M, BLOCK_R, RANKS, RANK_PARTS,
            BLOCK_K, STEPS, STAGES, BLOCK_P, EVEN_K, EVEN_RANKS, ATOMIC, PREFETCH, PREFETCH_B, PDL,
        )  # fmt: skip
        if key >= 0:
            arrive(counters + tile * SLICES + part)
    else:
        expand_program(
            pid - total_shrink, y, b0, b1, b2, b3, h, topk_weights, topk_ids, token_slots, adapter_enabled,
            sorted_pairs, tile_table, counters, num_pairs, max_tiles, num_slots, num_experts, R, n0, n1, n2,
            n3, col0, col1, col2, col3, chunk_n, num_chunks, stride_ym, stride_yk, stride_bl0, stride_bl1,
            stride_bl2, stride_bl3, stride_be, stride_bn, TOPK, HAS_EXPERTS, WEIGHTED, MODE, SLICES, SPLITS,
            BLOCK_S, BLOCK_M, BLOCK_R, BLOCK_N, E_STEPS, E_STAGES, BLOCK_P, GROUP, RANK_PARTS, EVEN_N,
            EVEN_R, ADD, True, PREFETCH, PDL,
        )  # fmt: skip
