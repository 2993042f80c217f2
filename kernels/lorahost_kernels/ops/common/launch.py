"""What the launchers share: checks, grids and the arguments of the shrink and expand programs."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorahost_kernels.configs import (
    ExpandConfig,
    ShrinkConfig,
    block_r,
    cdiv,
    chooser,
    next_pow2,
)
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.device import LIST, PAIR
from lorahost_kernels.ops.common.replay import Constants
from lorahost_kernels.ops.common.routing import Routing, check_weights, expert_stride

MODES = {"pair": PAIR.value, "list": LIST.value}
# the kernels' first arguments, in their order
ROUTING_POINTERS = ("topk_ids", "token_slots", "adapter_enabled", "sorted_pairs", "tile_table", "pair_rows")
POINTERS = {*ROUTING_POINTERS, "x", "y", "h", "topk_weights", *(f"{side}{i}" for side in "ab" for i in range(4))}
MAX_CHOICES = 16384


def even_chunk(total: int, pieces: int) -> int:
    """Columns per piece, a multiple of 16, so that `pieces` pieces or fewer cover `total`."""
    return cdiv(cdiv(total, pieces), 16) * 16


def tiles_of(routing: Routing, mode: str, block_m: int) -> int:
    """Upper bound of tiles, fixed by the batch's shape. Raises ValueError where the mode can't serve it."""
    if mode == "list":
        if routing.work is None or routing.work.block_m != block_m:
            have = None if routing.work is None else routing.work.block_m
            raise ValueError(f"mode list needs a work list of block_m={block_m}, have {have}")
        return routing.work.max_tiles
    return routing.num_pairs


def routing_pointers(routing: Routing, mode: str, pair_rows: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of ROUTING_POINTERS; token_slots stands for those that the mode doesn't read."""
    work, slots = routing.work if mode == "list" else None, routing.token_slots
    return (
        slots if routing.topk_ids is None else routing.topk_ids,
        slots,
        routing.adapter_enabled,
        slots if work is None else work.sorted_pairs,
        slots if work is None else work.tile_table,
        slots if pair_rows is None else pair_rows,
    )


def routing_args(routing: Routing, mode: str, num_slots: int, pair_rows: Tensor | None) -> dict[str, Any]:
    """Arguments that every program reads to find its rows."""
    return {
        **dict(zip(ROUTING_POINTERS, routing_pointers(routing, mode, pair_rows), strict=True)),
        "num_pairs": routing.num_pairs,
        "max_tiles": routing.work.stride if mode == "list" and routing.work else 0,
        "num_slots": num_slots,
        "num_experts": routing.num_experts,
        "TOPK": routing.topk,
        "HAS_EXPERTS": routing.topk_ids is not None,
        "HAS_ROWS": pair_rows is not None,
        "MODE": MODES[mode],
    }


def launch_key(
    operation: str, config: Any, rows: Tensor, weights: Sequence[Tensor], routing: Routing, extra: Any
) -> tuple[Any, ...]:
    """All that a launch's constants depend on, but for the alignment of its pointers."""
    ids, gates, work = routing.topk_ids, routing.topk_weights, routing.work
    return (
        operation, config, chooser(), rows.shape, rows.stride(), rows.dtype, rows.device, extra,
        tuple([(w.shape, w.stride(), w.dtype) for w in weights]),
        routing.num_tokens, routing.topk, routing.num_experts, routing.pair_rows is None,
        None if ids is None else ids.dtype, None if gates is None else gates.dtype,
        None if work is None else (work.block_m, work.max_tiles, work.stride),
    )  # fmt: skip


def four(values: Sequence[Any]) -> list[Any]:
    """Padded to four entries; kernels ignore the padding."""
    return [*values, *[values[0]] * (4 - len(values))]


def shrink_args(
    x: Tensor, lora_a: Sequence[Tensor], routing: Routing, rows_are_pairs: bool, config: ShrinkConfig
) -> tuple[dict[str, Any], int, int]:
    """(arguments, splits, programs) of the shrink program. Raises ValueError on shapes it can't address."""
    check_weights("lora_a", lora_a, routing, x.dtype)
    a = lora_a[0]
    num_slots, _, rank, k = a.shape
    if any(w.shape != a.shape or w.stride() != a.stride() for w in lora_a):
        raise ValueError("lora_a: all slices must have one shape and one set of strides")
    rows = routing.num_pairs if rows_are_pairs else routing.num_tokens
    if x.dim() != 2 or x.shape[0] != rows or x.shape[1] != k or x.stride(1) != 1:
        raise ValueError(f"x: want ({rows}, {k}) with contiguous rows, got {tuple(x.shape)} {x.stride()}")
    chunk = even_chunk(k, config.split_k)
    splits = cdiv(k, chunk)
    steps = cdiv(chunk, config.block_k)
    ranks = min(config.ranks or block_r(rank), block_r(rank)) if config.mode == "pair" else block_r(rank)
    parts = cdiv(rank, ranks)
    args = {
        "x": x,
        **dict(zip(("a0", "a1", "a2", "a3"), four(lora_a), strict=True)),
        "K": k,
        "R": rank,
        "chunk_k": chunk,
        "stride_x": x.stride(0),
        "stride_al": a.stride(0),
        "stride_ae": expert_stride(a),
        "stride_ar": a.stride(2),
        "X_TOPK": 1 if rows_are_pairs else routing.topk,
        "SLICES": len(lora_a),
        "SPLITS": splits,
        "BLOCK_M": config.block_m,
        "BLOCK_R": block_r(rank),
        "RANKS": ranks,
        "RANK_PARTS": parts,
        "BLOCK_K": config.block_k,
        "STEPS": steps,
        "STAGES": config.num_stages,
        "EVEN_K": not config.masks and chunk == steps * config.block_k and k == chunk * splits,
        "EVEN_R": ranks * parts == rank,
        "ATOMIC": config.atomic,
    }
    programs = tiles_of(routing, config.mode, config.block_m) * len(lora_a) * splits * parts
    pair_rows = routing.pair_rows if rows_are_pairs else None
    return {**routing_args(routing, config.mode, num_slots, pair_rows), **args}, splits, programs


def expand_args(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int],
    add_inputs: bool,
    config: ExpandConfig,
) -> tuple[dict[str, Any], int]:
    """(arguments, programs) of the expand program. Raises ValueError on shapes it can't address."""
    check_weights("lora_b", lora_b, routing, y.dtype)
    b = lora_b[0]
    rank, sizes = b.shape[3], [w.shape[2] for w in lora_b]
    lead = (routing.num_tokens,) if routing.topk_ids is None else (routing.num_tokens, routing.topk)
    if routing.pair_rows is not None:
        lead = (routing.num_pairs,)
    ends = [c + n for c, n in zip(columns, sizes, strict=True)]
    if tuple(y.shape[:-1]) != lead or y.shape[-1] < max(ends) or y.stride(-1) != 1:
        raise ValueError(f"y: want {(*lead, max(ends))} with contiguous columns, got {tuple(y.shape)}")
    if tuple(h.shape[1:]) != (routing.num_pairs, len(lora_b), rank) or not h.is_contiguous():
        raise ValueError(f"h: want (splits, {routing.num_pairs}, {len(lora_b)}, {rank}), got {tuple(h.shape)}")
    if any(w.stride(2) != b.stride(2) or w.shape[3] != rank for w in lora_b):
        raise ValueError("lora_b: all slices must have one rank and one row stride")
    width = config.block_n * config.steps
    chunk = even_chunk(max(sizes), cdiv(max(sizes), width))
    chunks = sum(cdiv(n, chunk) for n in sizes)
    args = {
        "y": y,
        "h": h,
        **dict(zip(("b0", "b1", "b2", "b3"), four(lora_b), strict=True)),
        **dict(zip(("n0", "n1", "n2", "n3"), four(sizes), strict=True)),
        **dict(zip(("col0", "col1", "col2", "col3"), four(columns), strict=True)),
        **{f"stride_bl{i}": w.stride(0) for i, w in enumerate(four(lora_b))},
        "topk_weights": y if routing.topk_weights is None else routing.topk_weights,
        "R": rank,
        "chunk_n": chunk,
        "num_chunks": chunks,
        "stride_ym": y.stride(0),
        "stride_yk": y.stride(1) if y.dim() == 3 else 0,
        "stride_be": expert_stride(b),
        "stride_bn": b.stride(2),
        "WEIGHTED": routing.topk_weights is not None,
        "SLICES": len(lora_b),
        "SPLITS": h.shape[0],
        "BLOCK_S": next_pow2(h.shape[0]),
        "BLOCK_M": config.block_m,
        "BLOCK_R": block_r(rank),
        "BLOCK_N": config.block_n,
        "STEPS": config.steps,
        "STAGES": config.num_stages,
        "GROUP": config.group,
        "EVEN_N": not config.masks and chunk == width and all(n % chunk == 0 for n in sizes),
        "EVEN_R": block_r(rank) == rank,
        "ADD": add_inputs,
        "PREFETCH": config.prefetch and y.is_cuda,
    }
    tiles = cdiv(tiles_of(routing, config.mode, config.block_m), config.group) * config.group
    return {**routing_args(routing, config.mode, b.shape[0], routing.pair_rows), **args}, tiles * chunks


def empty_hidden(splits: int, routing: Routing, slices: int, rank: int, device: torch.device) -> Tensor:
    """fp32 (splits, pairs, slices, rank) partial sums, not initialised."""
    return torch.empty(splits, routing.num_pairs, slices, rank, dtype=torch.float32, device=device)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch exists from sm_90 on; elsewhere the option is ignored."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(on: Tensor, config: ShrinkConfig | ExpandConfig) -> dict[str, Any]:
    """How the kernel is launched on the device of `on`."""
    pdl = config.pdl and has_pdl(on.device)
    return {"PDL": pdl, "num_warps": config.num_warps, "launch_pdl": pdl}


@dataclass(frozen=True, eq=False)
class Choice:
    """What one kind of launch was decided to be; compared by identity, since it is a key of ops.common.replay."""

    config: ShrinkConfig | ExpandConfig
    constants: Constants
    splits: int = 1

    def __call__(self) -> Constants:
        return self.constants


_choices: dict[tuple[Any, ...], Choice] = {}


def choose(key: tuple[Any, ...], config: ShrinkConfig | ExpandConfig, args: Any, programs: int, splits: int) -> Choice:
    """Remembers a launch's configuration and constants."""
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    constants = {name: value for name, value in args.items() if name not in POINTERS}
    on = next(value for value in args.values() if isinstance(value, Tensor))
    options = launch_options(on, config)
    constants["PDL"] = options.pop("PDL")
    choice = _choices[key] = Choice(config, Constants(programs, constants, options, config.specialize), splits)
    return choice


def run_shrink(
    kernel: Any,
    operation: str,
    x: Tensor,
    lora_a: Sequence[Tensor],
    routing: Routing,
    rows_are_pairs: bool,
    config: ShrinkConfig | None,
) -> Tensor:
    """Launches a shrink kernel; returns the fp32 partial sums (splits, pairs, slices, rank)."""
    key = launch_key(operation, config, x, lora_a, routing, rows_are_pairs)
    choice = _choices.get(key)
    if choice is None:
        config = config or default_shrink(routing, lora_a, operation)
        args, splits, programs = shrink_args(x, lora_a, routing, rows_are_pairs, config)
        choice = choose(key, config, args, programs, 1 if config.atomic else splits)
    h = empty_hidden(choice.splits, routing, len(lora_a), lora_a[0].shape[2], x.device)
    if isinstance(choice.config, ShrinkConfig) and choice.config.atomic:
        h.zero_()
    rows = routing.pair_rows if rows_are_pairs else None
    replay.launch(kernel, choice, (x, *four(lora_a), h, *routing_pointers(routing, choice.config.mode, rows)), choice)
    return h


def run_expand(
    kernel: Any,
    operation: str,
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    routing: Routing,
    columns: Sequence[int],
    add_inputs: bool,
    config: ExpandConfig | None,
) -> None:
    """Launches an expand kernel; y changes in place."""
    key = launch_key(operation, config, y, lora_b, routing, (tuple(columns), add_inputs, h.shape))
    choice = _choices.get(key)
    if choice is None:
        config = config or default_expand(routing, lora_b, operation)
        args, programs = expand_args(y, h, lora_b, routing, columns, add_inputs, config)
        choice = choose(key, config, args, programs, 1)
    weights = y if routing.topk_weights is None else routing.topk_weights
    if isinstance(choice.config, ExpandConfig) and add_inputs and not choice.config.fused_add:
        apart = torch.zeros_like(y)
        run_expand(kernel, operation, apart, h, lora_b, routing, columns, False, choice.config)
        y.add_(apart)
        return
    lists = routing_pointers(routing, choice.config.mode, routing.pair_rows)
    replay.launch(kernel, choice, (y, *four(lora_b), h, weights, *lists), choice)
