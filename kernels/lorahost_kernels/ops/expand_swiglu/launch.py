"""Launcher of expand_swiglu."""

from typing import Any

from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, block_r, cdiv, chooser, next_pow2
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.defaults import default_expand
from lorahost_kernels.ops.common.launch import even_chunk, has_pdl, launch_key, routing_pointers, tiles_of
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.common.routing import Routing, check_weights, expert_stride
from lorahost_kernels.ops.expand_swiglu.kernel import expand_swiglu_kernel, expand_swiglu_list_kernel

BASE_PAIRS = 64  # pairs that one program of the list kernel searches for rows without LoRA work


def expand_swiglu(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float, pdl: bool = True,
    config: ExpandConfig | None = None,
) -> None:  # fmt: skip
    """out (pairs, n) = swiglu of y (pairs, 2n) + h times lora_b (slots, experts, 2n, r); pair_rows gives the rows.

    swiglu(g, u) = g * sigmoid(alpha * g) * (u + 1), g at most `limit`, u within +-limit; g and u alternate. Rows
    without an adapter get the activation of y; pairs with row -1 are left out.

    config: tiles, of mode list for a routing with a work list, else of mode pair, which reads block_n, num_warps and
    the switches pdl, masks and specialize; block_n counts columns of y. None: the active table's, else the defaults.

    Raises:
        ValueError: shapes that don't fit, a routing without pair_rows, or tiles that its work list doesn't have.
    """
    check_weights("lora_b", (lora_b,), routing, y.dtype)
    _, _, width, rank = lora_b.shape
    pairs = routing.num_pairs
    if routing.pair_rows is None or routing.topk_ids is None:
        raise ValueError("expand_swiglu needs topk_ids and pair_rows")
    if tuple(y.shape) != (pairs, width) or tuple(out.shape) != (pairs, width // 2) or width % 2:
        raise ValueError(f"want y ({pairs}, {width}) and out half as wide, got {tuple(y.shape)} {tuple(out.shape)}")
    if y.stride(1) != 1 or out.stride(1) != 1 or not h.is_contiguous() or tuple(h.shape[1:]) != (pairs, 1, rank):
        raise ValueError(f"y and out need contiguous columns, h (splits, {pairs}, 1, {rank}), got {tuple(h.shape)}")
    pdl = pdl and has_pdl(y.device)
    if routing.work is None and (config is None or config.mode == "pair"):
        by_pairs(out, y, h, lora_b, routing, alpha, limit, pdl, config)
    else:
        by_tiles(out, y, h, lora_b, routing, alpha, limit, pdl, config)


def shared_args(out: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float) -> dict[str, Any]:
    """Arguments that both kernels have."""
    slots, _, width, rank = lora_b.shape
    return {
        "num_pairs": routing.num_pairs, "num_slots": slots, "num_experts": routing.num_experts, "R": rank,
        "N": width // 2, "stride_om": out.stride(0), "stride_bl": lora_b.stride(0), "stride_be": expert_stride(lora_b),
        "stride_bn": lora_b.stride(2), "alpha": float(alpha), "limit": float(limit), "TOPK": routing.topk,
        "SPLITS": h.shape[0], "BLOCK_R": block_r(rank), "EVEN_R": block_r(rank) == rank,
    }  # fmt: skip


def by_pairs(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float, pdl: bool,
    config: ExpandConfig | None,
) -> None:  # fmt: skip
    """Each pair by programs of its own."""
    assert routing.topk_ids is not None
    assert routing.pair_rows is not None

    def constants() -> Constants:
        tiling = config or default_expand(routing, (lora_b,), "expand_swiglu")
        n, block_n = lora_b.shape[2] // 2, max(16, tiling.block_n // 2)
        chunks, on = cdiv(n, block_n), tiling.pdl and pdl
        args = {
            **shared_args(out, h, lora_b, routing, alpha, limit), "num_chunks": chunks, "stride_ym": y.stride(0),
            "BLOCK_S": next_pow2(h.shape[0]), "BLOCK_N": block_n, "EVEN_N": not tiling.masks and n == chunks * block_n,
            "PDL": on,
        }  # fmt: skip
        options = {"num_warps": tiling.num_warps, "launch_pdl": on}
        return Constants(routing.num_pairs * chunks, args, options, tiling.specialize)

    key = (
        out.stride(0), y.stride(0), y.dtype, out.dtype, lora_b.shape, lora_b.stride(), h.shape, routing.num_tokens,
        routing.topk, routing.num_experts, routing.topk_ids.dtype, alpha, limit, pdl, config, chooser(), y.device,
    )  # fmt: skip
    tensors = (out, y, lora_b, h, routing.topk_ids, routing.token_slots, routing.adapter_enabled, routing.pair_rows)
    replay.launch(expand_swiglu_kernel, key, tensors, constants)


def by_tiles(
    out: Tensor, y: Tensor, h: Tensor, lora_b: Tensor, routing: Routing, alpha: float, limit: float, pdl: bool,
    config: ExpandConfig | None,
) -> None:  # fmt: skip
    """The work list's tiles, and in the same grid the pairs that are in none of them."""

    def constants() -> Constants:
        tiling = config or default_expand(routing, (lora_b,), "expand_swiglu")
        if tiling.mode != "list":
            raise ValueError(f"expand_swiglu takes tiles of mode list for a work list, got mode {tiling.mode}")
        tiles = cdiv(tiles_of(routing, "list", tiling.block_m), tiling.group) * tiling.group
        n, block_n = lora_b.shape[2] // 2, max(16, tiling.block_n // 2)
        most = tiling.steps * block_n
        chunk = even_chunk(n, cdiv(n, most))
        chunks, blocks = cdiv(n, chunk), cdiv(routing.num_pairs, BASE_PAIRS)
        on = tiling.pdl and pdl
        args = {
            **shared_args(out, h, lora_b, routing, alpha, limit), "stride_ym": y.stride(0), "base_blocks": blocks,
            "max_tiles": routing.work.stride if routing.work else 0, "chunk_n": chunk, "num_chunks": chunks,
            # as many as fit the registers that the tiles need anyway
            "BLOCK_P": BASE_PAIRS, "BASE_COLS": 256 * tiling.num_warps if tiling.num_warps <= 2 else 128,
            "BLOCK_M": tiling.block_m, "BLOCK_N": block_n, "STEPS": tiling.steps, "STAGES": tiling.num_stages,
            "GROUP": tiling.group, "EVEN_N": not tiling.masks and chunk == most and n == chunks * chunk,
            "PREFETCH": tiling.prefetch and y.is_cuda, "PDL": on,
        }  # fmt: skip
        options = {"num_warps": tiling.num_warps, "launch_pdl": on}
        return Constants(blocks + tiles * chunks, args, options, tiling.specialize)

    key = launch_key(
        "expand_swiglu", config, y, (lora_b,), routing, (out.stride(0), out.dtype, h.shape, alpha, limit, pdl)
    )
    tensors = (out, y, lora_b, h, *routing_pointers(routing, "list", routing.pair_rows))
    replay.launch(expand_swiglu_list_kernel, key, tensors, constants)
