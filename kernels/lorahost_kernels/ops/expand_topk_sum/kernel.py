"""Triton kernel of expand_topk_sum: down_expand and the sum over a token's experts in one launch, for few tokens."""

import triton
import triton.language as tl

from lorahost_kernels.ops.common.device import LISTS, pdl_wait


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=LISTS)
def expand_topk_sum_kernel(
    out, y, b, h, topk_weights, topk_ids, token_slots, adapter_enabled, num_tokens, num_slots, num_experts, R, N,
    num_chunks, stride_om, stride_ym, stride_yk, stride_bl, stride_be, stride_bn,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over k of y[token, k] + weight * h[pair] . B[slot, expert]; experts of -1 are left out.

    Under PDL all but h is read before the wait: the launch before this one is the shrink, which waited for y.
    """
    pid = tl.program_id(0)
    token, chunk = pid // num_chunks, pid % num_chunks
    ks = tl.arange(0, BLOCK_K)
    pairs = token.to(tl.int64) * TOPK + ks
    expert = tl.load(topk_ids + pairs, mask=ks < TOPK, other=-1).to(tl.int32)
    routed = expert >= 0
    cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    y_ptrs = y + token.to(tl.int64) * stride_ym + ks[:, None] * stride_yk + cols[None, :]
    base = tl.load(y_ptrs, mask=routed[:, None] & (cols[None, :] < N), other=0.0)
    acc = tl.sum(base.to(tl.float32), axis=0)
    slot = tl.load(token_slots + token).to(tl.int32)
    alive = (slot >= 0) & (slot < num_slots)
    alive = alive & (tl.load(adapter_enabled + slot, mask=alive, other=0) != 0)
    if alive:
        ranks = tl.arange(0, BLOCK_R)
        mine = routed & (expert < num_experts)
        weights = b + slot.to(tl.int64) * stride_bl + tl.where(mine, expert, 0).to(tl.int64) * stride_be
        pointers = weights[:, None, None] + cols[None, :, None] * stride_bn + ranks[None, None, :]
        mask = mine[:, None, None]
        if not (EVEN_N and EVEN_R):
            mask = mask & (cols[None, :, None] < N) & (ranks[None, None, :] < R)
        w = tl.load(pointers, mask=mask, other=0.0)
        gates = tl.load(topk_weights + pairs, mask=mine, other=0.0).to(tl.float32)
        pdl_wait(PDL)
        hidden = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            h_ptrs = h + (split * tl.cast(num_tokens, tl.int64) * TOPK + pairs[:, None]) * R + ranks[None, :]
            hidden += tl.load(h_ptrs, mask=mine[:, None] & (ranks[None, :] < R), other=0.0)
        hidden = hidden * gates[:, None]
        acc += tl.sum(tl.sum(w.to(tl.float32) * hidden[:, None, :], axis=2), axis=0)
    else:
        pdl_wait(PDL)
    tl.store(out + token.to(tl.int64) * stride_om + cols, acc.to(out.dtype.element_ty), mask=cols < N)
