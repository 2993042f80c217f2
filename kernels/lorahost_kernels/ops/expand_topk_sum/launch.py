"""Launcher of expand_topk_sum."""

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, block_r, cdiv, chooser, next_pow2
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.defaults import default_expand
from lorahost_kernels.ops.common.launch import has_pdl
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.common.routing import Routing, check_weights, expert_stride
from lorahost_kernels.ops.expand_topk_sum.kernel import expand_topk_sum_kernel
from lorahost_kernels.tuned.legal import topk_sum_problem


def expand_topk_sum(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, pdl: bool = True,
    config: ExpandConfig | None = None,
) -> None:  # fmt: skip
    """out (tokens, n) = sum over a token's experts of y (tokens, topk, n) + topk_weight * h times lora_b.

    lora_b is (slots, experts, n, r). Tokens without an adapter get the sum of y; pairs of expert -1 are left out.

    config: tiles of mode pair, of which block_n, num_warps and the switches pdl, masks and specialize are read. None:
    the active table's, else the defaults.

    Raises:
        ValueError: shapes that don't fit, a routing without topk_ids and topk_weights, or tiles that are too large.
    """
    check_weights("lora_b", (lora_b,), routing, y.dtype)
    slots, _, n, rank = lora_b.shape
    tokens, topk = routing.num_tokens, routing.topk
    if routing.topk_ids is None or routing.topk_weights is None:
        raise ValueError("expand_topk_sum needs topk_ids and topk_weights")
    if tuple(y.shape) != (tokens, topk, n) or tuple(out.shape) != (tokens, n):
        raise ValueError(f"want y {(tokens, topk, n)} and out {(tokens, n)}, got {tuple(y.shape)} {tuple(out.shape)}")
    if (
        y.stride(2) != 1
        or out.stride(1) != 1
        or not h.is_contiguous()
        or tuple(h.shape[1:]) != (tokens * topk, 1, rank)
    ):
        raise ValueError(
            f"y and out need contiguous columns, h (splits, {tokens * topk}, 1, {rank}), got {tuple(h.shape)}"
        )
    pdl = pdl and has_pdl(y.device)

    def constants() -> Constants:
        tiling = config or default_expand(routing, (lora_b,), "expand_topk_sum")
        wrong = topk_sum_problem(tiling, topk, rank)
        if wrong:
            raise ValueError(f"expand_topk_sum: {wrong}")
        block_n, on = tiling.block_n, tiling.pdl and pdl
        chunks = cdiv(n, block_n)
        args = {
            "num_tokens": tokens, "num_slots": slots, "num_experts": routing.num_experts, "R": rank, "N": n,
            "num_chunks": chunks, "stride_om": out.stride(0), "stride_ym": y.stride(0), "stride_yk": y.stride(1),
            "stride_bl": lora_b.stride(0), "stride_be": expert_stride(lora_b), "stride_bn": lora_b.stride(2),
            "TOPK": topk, "BLOCK_K": next_pow2(topk), "SPLITS": h.shape[0], "BLOCK_R": block_r(rank),
            "BLOCK_N": block_n, "EVEN_N": not tiling.masks and n == chunks * block_n, "EVEN_R": block_r(rank) == rank,
            "PDL": on,
        }  # fmt: skip
        options = {"num_warps": tiling.num_warps, "launch_pdl": on}
        return Constants(tokens * chunks, args, options, tiling.specialize)

    ids, gates = routing.topk_ids, routing.topk_weights
    key = (
        out.stride(0), y.stride(), y.dtype, out.dtype, lora_b.shape, lora_b.stride(), h.shape, tokens, topk, ids.dtype,
        gates.dtype, pdl, routing.num_experts, config, chooser(), y.device,
    )  # fmt: skip
    tensors = (out, y, lora_b, h, gates, ids, routing.token_slots, routing.adapter_enabled)
    replay.launch(expand_topk_sum_kernel, key, tensors, constants)
