"""Launcher of expand_swiglu."""

from torch import Tensor

from lorahost_kernels.configs import block_r, cdiv, next_pow2
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.launch import has_pdl
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.common.routing import Routing, check_weights, expert_stride
from lorahost_kernels.ops.expand_swiglu.kernel import expand_swiglu_kernel


def expand_swiglu(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float, pdl: bool = True
) -> None:
    """out (pairs, n) = swiglu of y (pairs, 2n) + h times lora_b (slots, experts, 2n, r); pair_rows gives the rows.

    swiglu(g, u) = g * sigmoid(alpha * g) * (u + 1), g at most `limit`, u within +-limit; g and u alternate. Rows
    without an adapter get the activation of y; pairs with row -1 are left out.

    Raises:
        ValueError: shapes that don't fit, or a routing without pair_rows.
    """
    check_weights("lora_b", (lora_b,), routing, y.dtype)
    slots, _, width, rank = lora_b.shape
    pairs = routing.num_pairs
    if routing.pair_rows is None or routing.topk_ids is None:
        raise ValueError("expand_swiglu needs topk_ids and pair_rows")
    if tuple(y.shape) != (pairs, width) or tuple(out.shape) != (pairs, width // 2) or width % 2:
        raise ValueError(f"want y ({pairs}, {width}) and out half as wide, got {tuple(y.shape)} {tuple(out.shape)}")
    if y.stride(1) != 1 or out.stride(1) != 1 or not h.is_contiguous() or tuple(h.shape[1:]) != (pairs, 1, rank):
        raise ValueError(f"y and out need contiguous columns, h (splits, {pairs}, 1, {rank}), got {tuple(h.shape)}")
    pdl = pdl and has_pdl(y.device)

    def constants() -> Constants:
        block_n = max(16, min(64, 2048 // block_r(rank)))
        chunks = cdiv(width // 2, block_n)
        args = {
            "num_pairs": pairs, "num_slots": slots, "num_experts": routing.num_experts, "R": rank, "N": width // 2,
            "num_chunks": chunks, "stride_om": out.stride(0), "stride_ym": y.stride(0), "stride_bl": lora_b.stride(0),
            "stride_be": expert_stride(lora_b), "stride_bn": lora_b.stride(2), "alpha": float(alpha),
            "limit": float(limit), "TOPK": routing.topk, "SPLITS": h.shape[0], "BLOCK_S": next_pow2(h.shape[0]),
            "BLOCK_R": block_r(rank), "BLOCK_N": block_n, "EVEN_N": width // 2 == chunks * block_n,
            "EVEN_R": block_r(rank) == rank, "PDL": pdl,
        }  # fmt: skip
        return Constants(pairs * chunks, args, {"num_warps": 4, "launch_pdl": pdl})

    key = (
        out.stride(0), y.stride(0), y.dtype, out.dtype, lora_b.shape, lora_b.stride(), h.shape, routing.num_tokens,
        routing.topk, routing.topk_ids.dtype, alpha, limit, pdl,
    )  # fmt: skip
    tensors = (out, y, lora_b, h, routing.topk_ids, routing.token_slots, routing.adapter_enabled, routing.pair_rows)
    replay.launch(expand_swiglu_kernel, key, tensors, constants)
