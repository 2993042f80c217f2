"""Triton kernel of gate_up_shrink; the body is ops.common.shrink."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS
from lorahost_kernels.ops.common.shrink import shrink_program


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"], do_not_specialize_on_alignment=LISTS)
def gate_up_shrink_kernel(
    x, a0, a1, a2, a3, h, topk_ids, token_slots, adapter_enabled, sorted_pairs, tile_table, pair_rows, num_pairs,
    max_tiles, num_slots, num_experts, K, R, chunk_k, stride_x, stride_al, stride_ae, stride_ar,
    TOPK: tl.constexpr, X_TOPK: tl.constexpr, HAS_EXPERTS: tl.constexpr, HAS_ROWS: tl.constexpr, MODE: tl.constexpr,
    SLICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    RANKS: tl.constexpr, RANK_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr, ATOMIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h[split, pair, slice] = x[token] . A[slot, expert] over one part of K, for gate and up."""
    shrink_program(
        tl.program_id(0), x, a0, a1, a2, a3, h, topk_ids, token_slots, adapter_enabled, sorted_pairs,
        tile_table, pair_rows, num_pairs, max_tiles, num_slots, num_experts, K, R, chunk_k, stride_x, stride_al,
        stride_ae, stride_ar, TOPK, X_TOPK, HAS_EXPERTS, HAS_ROWS, MODE, SLICES, SPLITS, BLOCK_M, BLOCK_R, RANKS,
        RANK_PARTS, BLOCK_K, STEPS, STAGES, EVEN_K, EVEN_R, ATOMIC, PDL,
    )  # fmt: skip
