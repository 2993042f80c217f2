"""One check for each operation: its error against the reference, ||out - reference|| / ||reference||.

Operations are held against their references one by one, so that a wrong one is named and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorahost_kernels.ops.common.routing import Routing, slice_columns
from lorahost_kernels.ops.down_expand import naive as down_expand_naive
from lorahost_kernels.ops.down_expand.launch import down_expand
from lorahost_kernels.ops.down_shrink import naive as down_shrink_naive
from lorahost_kernels.ops.down_shrink.launch import down_shrink
from lorahost_kernels.ops.expand import naive as expand_naive
from lorahost_kernels.ops.expand.launch import expand
from lorahost_kernels.ops.expand_swiglu import naive as expand_swiglu_naive
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.expand_topk_sum import naive as expand_topk_sum_naive
from lorahost_kernels.ops.expand_topk_sum.launch import expand_topk_sum
from lorahost_kernels.ops.expert_order import naive as expert_order_naive
from lorahost_kernels.ops.expert_order.launch import ONE_PROGRAM, expert_order
from lorahost_kernels.ops.gate_up_expand import naive as gate_up_expand_naive
from lorahost_kernels.ops.gate_up_expand.launch import gate_up_expand
from lorahost_kernels.ops.gate_up_shrink import naive as gate_up_shrink_naive
from lorahost_kernels.ops.gate_up_shrink.launch import gate_up_shrink
from lorahost_kernels.ops.shrink import naive as shrink_naive
from lorahost_kernels.ops.shrink.launch import shrink
from lorahost_kernels.ops.work_list import naive as work_list_naive
from lorahost_kernels.ops.work_list.launch import build_work_list, counts_for
from lorahost_kernels.self_check.batches import (
    DECODE,
    EXPERTS,
    HIDDEN,
    PREFILL,
    RANK,
    SLOTS,
    TOPK,
    WIDTH,
    Batch,
    batch,
    expert_ids,
)

ALPHA, LIMIT = 1.702, 1.5
QKV = (192, 48, 48)


class WrongResultError(RuntimeError):
    """A result is wrong in a way that no error norm shows."""


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN where either has one."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm())


def settle(device: torch.device) -> None:
    """Waits for the device: a chain's first launch may read the routing before the launch ahead of it has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shrink_error(launch: Any, reference: Any, b: Batch, x: Tensor, lora_a: Sequence[Tensor]) -> float:
    """Of a shrink's partial sums, over the pairs with work."""
    settle(b.device)
    h = launch(x, lora_a, b.routing, b.shrink_config(x.shape[1], len(lora_a)))
    want = reference(x, lora_a, b.routing)
    return relative_error(h.sum(0)[b.working], want.sum(0)[b.working])


def expand_error(launch: Any, reference: Any, b: Batch, y: Tensor, lora_b: Sequence[Tensor], touched: Tensor) -> float:
    """Of an expand's output; rows that are not `touched` must stay as they are."""
    want, before = y.double(), y.clone()
    h = b.hidden(len(lora_b))
    settle(b.device)
    launch(y, h, lora_b, b.routing, slice_columns(lora_b), True, b.expand_config(lora_b[0].shape[2], len(lora_b)))
    reference(want, h, lora_b, b.routing)
    if not torch.equal(y[~touched], before[~touched]):
        raise WrongResultError("rows without LoRA work were changed")
    return relative_error(y[touched], want[touched])


def moe_batches(device: torch.device, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """By pairs in token order, and by tiles of 16 rows that are ordered by expert."""
    pairs = batch(device, dtype, DECODE, dense=False, block_m=None)
    pairs = replace(pairs, routing=replace(pairs.routing, pair_rows=None))
    return pairs, batch(device, dtype, PREFILL, dense=False, block_m=16)


def dense_batches(device: torch.device, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """By pairs, and by tiles of 64 rows."""
    return batch(device, dtype, DECODE, True, None), batch(device, dtype, PREFILL, True, 64)


def by_row(b: Batch, of_pairs: Tensor) -> Tensor:
    """Values of pairs in the order of the rows between the two base GEMMs; False where no pair has the row."""
    rows = b.routing.pair_rows
    if rows is None:
        return of_pairs
    found = torch.zeros_like(of_pairs)
    found[rows[rows >= 0].long()] = of_pairs[rows >= 0]
    return found


def check_gate_up_shrink(device: torch.device, dtype: torch.dtype) -> float:
    """One interleaved slice by pairs, gate and up apart by tiles."""
    errors = []
    for b, slices in zip(moe_batches(device, dtype), (1, 2), strict=True):
        a, x = b.weights(*[(RANK, HIDDEN)] * slices), b.draw(b.routing.num_tokens, HIDDEN)
        errors.append(shrink_error(gate_up_shrink, gate_up_shrink_naive.gate_up_shrink, b, x, a))
    return worst(errors)


def check_gate_up_expand(device: torch.device, dtype: torch.dtype) -> float:
    """The same layouts."""
    errors = []
    for b, slices in zip(moe_batches(device, dtype), (1, 2), strict=True):
        weights = b.weights(*[(2 * WIDTH // slices, RANK)] * slices)
        y, touched = b.draw(b.routing.num_pairs, 2 * WIDTH), by_row(b, b.working)
        if b.routing.pair_rows is None:
            y, touched = y.view(-1, TOPK, 2 * WIDTH), touched.view(-1, TOPK)
        b = replace(b, routing=replace(b.routing, topk_weights=None))
        errors.append(expand_error(gate_up_expand, gate_up_expand_naive.gate_up_expand, b, y, weights, touched))
    return worst(errors)


def check_down_shrink(device: torch.device, dtype: torch.dtype) -> float:
    """Rows of pairs."""
    errors = []
    for b in moe_batches(device, dtype):
        a, x = b.weights((RANK, WIDTH)), b.draw(b.routing.num_pairs, WIDTH)
        errors.append(shrink_error(down_shrink, down_shrink_naive.down_shrink, b, x, a))
    return worst(errors)


def check_down_expand(device: torch.device, dtype: torch.dtype) -> float:
    """With top-k weights, into token order."""
    errors = []
    for b in moe_batches(device, dtype):
        y = b.draw(b.routing.num_tokens, TOPK, HIDDEN)
        weights, touched = b.weights((HIDDEN, RANK)), b.working.view(-1, TOPK)
        errors.append(expand_error(down_expand, down_expand_naive.down_expand, b, y, weights, touched))
    return worst(errors)


def check_shrink(device: torch.device, dtype: torch.dtype) -> float:
    """Three slices by pairs, one by tiles."""
    errors = []
    for b, slices in zip(dense_batches(device, dtype), (3, 1), strict=True):
        a, x = b.weights(*[(RANK, HIDDEN)] * slices), b.draw(b.routing.num_tokens, HIDDEN)
        errors.append(shrink_error(shrink, shrink_naive.shrink, b, x, a))
    return worst(errors)


def check_expand(device: torch.device, dtype: torch.dtype) -> float:
    """Three slices of unequal width by pairs, one by tiles."""
    errors = []
    for b, widths in zip(dense_batches(device, dtype), (QKV, (HIDDEN,)), strict=True):
        weights, y = b.weights(*[(n, RANK) for n in widths]), b.draw(b.routing.num_tokens, sum(widths))
        errors.append(expand_error(expand, expand_naive.expand, b, y, weights, b.working))
    return worst(errors)


def check_expand_swiglu(device: torch.device, dtype: torch.dtype) -> float:
    """All pairs that have a row, with an adapter or without: by pairs, and by tiles of 16 rows."""
    decode = batch(device, dtype, DECODE, dense=False, block_m=None)
    prefill = batch(device, dtype, PREFILL, dense=False, block_m=16)
    return worst([swiglu_error(b) for b in (decode, prefill)])


def swiglu_error(b: Batch) -> float:
    """Of expand_swiglu's output; the rest of the buffer must stay as it is."""
    device, dtype = b.device, b.dtype
    y, weights = b.draw(b.routing.num_pairs, 2 * WIDTH), b.weights((2 * WIDTH, RANK))[0]
    got = torch.full((b.routing.num_pairs, WIDTH), float("nan"), dtype=dtype, device=device)
    want, h = got.double(), b.hidden(1)
    settle(device)
    expand_swiglu(got, y, h, weights, b.routing, ALPHA, LIMIT)
    expand_swiglu_naive.expand_swiglu(want, y, h, weights, b.routing, ALPHA, LIMIT)
    written = ~want.isnan()
    if not got[~written].isnan().all():
        raise WrongResultError("rows that belong to no pair were written")
    return relative_error(got[written], want[written])


def check_expand_topk_sum(device: torch.device, dtype: torch.dtype) -> float:
    """All tokens; pairs of expert -1 hold NaN."""
    b = batch(device, dtype, DECODE, dense=False, block_m=None)
    y, weights = b.draw(DECODE, TOPK, HIDDEN), b.weights((HIDDEN, RANK))[0]
    assert b.routing.topk_ids is not None
    y[b.routing.topk_ids < 0] = float("nan")
    got = torch.full((DECODE, HIDDEN), float("nan"), dtype=dtype, device=device)
    want, h = got.double(), b.hidden(1)
    settle(device)
    expand_topk_sum(got, y, h, weights, b.routing)
    expand_topk_sum_naive.expand_topk_sum(want, y, h, weights, b.routing)
    return relative_error(got, want)


def check_work_list(device: torch.device, dtype: torch.dtype) -> float:
    """Share of the (slot, expert) groups that are wrong."""
    routing = batch(device, dtype, PREFILL, dense=False, block_m=None).routing
    settle(device)
    found = groups_in(build_work_list(routing, SLOTS, 16))
    want = {key: sorted(pairs) for key, pairs in work_list_naive.build_work_list(routing, SLOTS, 16)}
    counts_are_zero(device)
    return sum(want.get(key) != found.get(key) for key in want.keys() | found.keys()) / len(want)


def groups_in(routing: Routing) -> dict[int, list[int]]:
    """The pairs of each group, read as the kernels read the list."""
    work = routing.work
    assert work is not None
    count, *table = work.tile_table.tolist()
    order, found = work.sorted_pairs.tolist(), dict[int, list[int]]()
    for tile in range(min(count, work.stride)):
        key, first, rows = table[tile], table[work.stride + tile], table[2 * work.stride + tile]
        if not 1 <= rows <= work.block_m:
            raise WrongResultError(f"a tile of {rows} rows, want 1 to {work.block_m}")
        found.setdefault(key, []).extend(order[first : first + rows])
    return {key: sorted(pairs) for key, pairs in found.items()}


def check_expert_order(device: torch.device, dtype: torch.dtype) -> float:
    """Share of the tables that are wrong; few pairs take one launch, many take three."""
    shares = []
    for tokens in (PREFILL, ONE_PROGRAM // TOPK + 44):
        ids = expert_ids(tokens)
        g = torch.Generator(device="cpu").manual_seed(tokens)
        gates = torch.rand(tokens, TOPK, generator=g, dtype=torch.float32, device="cpu")
        want = expert_order_naive.expert_order(ids, gates, EXPERTS, 16, dtype)
        on_device = (ids.to(device), gates.to(device))
        settle(device)
        got = expert_order(*on_device, EXPERTS, 16, dtype)
        names = ("expert_rows", "first_row", "first_tile", "tile_map")
        right = [torch.equal(getattr(got, name).cpu(), getattr(want, name)) for name in names]
        # any order within an expert will do, if all tables agree on it
        flat, rows = ids.flatten(), int(want.first_row[-1])
        pair_rows, row_pairs = got.pair_rows.cpu().long(), got.row_pairs.cpu().long()
        inverse = (flat >= 0).nonzero().flatten()
        right.append(bool((pair_rows[flat < 0] == -1).all() and (row_pairs[rows:] == -1).all()))
        right.append(bool((pair_rows[inverse] >= 0).all()))
        right.append(torch.equal(row_pairs[pair_rows[inverse].clamp(0)], inverse))
        pairs = row_pairs[:rows].clamp(0)
        right.append(torch.equal(flat[pairs], flat[pairs].sort().values))
        right.append(torch.equal(got.row_weights.cpu()[:rows], gates.flatten()[pairs].to(dtype)))
        shares.append(right.count(False) / len(right))
        counts_are_zero(device)
    return worst(shares)


def counts_are_zero(device: torch.device) -> None:
    """The counters that builds share must be left as they were found."""
    if counts_for(device).any():
        raise WrongResultError("group counters were not reset, the next list would be wrong")


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN if any is."""
    return float(torch.tensor(errors, dtype=torch.float64, device="cpu").max())


CHECKS: dict[str, Callable[[torch.device, torch.dtype], float]] = {
    "gate_up_shrink": check_gate_up_shrink,
    "gate_up_expand": check_gate_up_expand,
    "down_shrink": check_down_shrink,
    "down_expand": check_down_expand,
    "expand_swiglu": check_expand_swiglu,
    "expand_topk_sum": check_expand_topk_sum,
    "expert_order": check_expert_order,
    "work_list": check_work_list,
    "shrink": check_shrink,
    "expand": check_expand,
}
# Operations on indices have one right answer.
EXACT = ("expert_order", "work_list")
