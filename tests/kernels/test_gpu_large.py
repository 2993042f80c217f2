"""On a GPU: tensors of more than 2^31 elements, where an address in 32 bits would wrap around."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig, expand_config, shrink_config
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.work_list.launch import build_work_list

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned_workspace"),
]
LIMIT = 5e-3
CUDA = torch.device("cuda")
LARGE = 1 << 31
MODES = pytest.mark.parametrize("block_m", [None, 16, 64], ids=["pair", "list16", "list64"])


def random(*shape: int) -> torch.Tensor:
    """bf16, scaled by the last dimension."""
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


def grouped(routing: Routing, slots: int, block_m: int | None) -> Routing:
    """With a work list of `block_m` rows a tile, or as it is."""
    return routing if block_m is None else build_work_list(routing, slots, block_m)


def configs(
    routing: Routing, groups: int, rank: int, k: int, n: int, block_m: int | None
) -> tuple[ShrinkConfig, ExpandConfig]:
    """The default tiles of this mode, whatever the batch's size would choose."""
    pairs = routing.num_pairs
    return shrink_config(pairs, groups, rank, k, 1, block_m), expand_config(pairs, groups, rank, n, 1, block_m)


def batch(tokens: int, slots: Sequence[int], experts: Sequence[int], num_experts: int) -> Routing:
    """Each token has one of `slots` and all of `experts`."""
    token_slots = torch.tensor(slots, device=CUDA, dtype=torch.int32).repeat(-(-tokens // len(slots)))[:tokens]
    ids = torch.tensor(experts, device=CUDA, dtype=torch.int32).expand(tokens, -1).contiguous()
    gates = torch.rand(tokens, len(experts), device=CUDA)
    return Routing(token_slots, torch.ones(max(slots) + 2, device=CUDA, dtype=torch.int32), num_experts, ids, gates)


def rows_of_interest(pairs: int) -> list[int]:
    """Pairs at both ends, whose rows are far apart."""
    return [*range(8), *range(pairs - 8, pairs)]


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    """||out - want|| / ||want|| is below the limit."""
    assert float((out.double() - want).norm() / want.norm()) < LIMIT


@MODES
def test_weights_of_the_last_slot_and_expert(block_m: int | None) -> None:
    slots, experts, rank, k, n = 64, 128, 64, 4352, 4352
    a, b = random(slots, experts, rank, k), random(slots, experts, n, rank)
    assert min(a.numel(), b.numel()) > LARGE
    routing = batch(24, [0, slots - 1], [0, experts - 1], experts)
    x, y = random(24, k), random(24, 2, n)
    want = y.double()
    for token in range(24):
        for j, expert in enumerate((0, experts - 1)):
            slot = int(routing.token_slots[token])
            want[token, j] += b[slot, expert].double() @ (a[slot, expert].double() @ x[token].double())
    chosen = configs(routing, slots * experts, rank, k, n, block_m)
    layer.gate_up(y, x, [a], [b], grouped(routing, slots, block_m), configs=chosen)
    close(y, want)


@MODES
def test_rows_of_a_large_batch(block_m: int | None) -> None:
    tokens, topk, experts, rank, hidden, columns = 65536, 4, 4, 16, 1024, 8448
    routing = batch(tokens, [0, 1], [3, 1, 0, 2], experts)
    x, y = random(tokens, hidden), random(tokens, topk, columns)
    assert y.numel() > LARGE
    a, b = random(2, experts, rank, hidden), random(2, experts, columns, rank)
    pairs = rows_of_interest(tokens * topk)
    before = y.view(-1, columns)[pairs].double()
    want = before.clone()
    assert routing.topk_ids is not None
    assert routing.topk_weights is not None
    for i, pair in enumerate(pairs):
        slot, expert = int(routing.token_slots[pair // topk]), int(routing.topk_ids.view(-1)[pair])
        want[i] += b[slot, expert].double() @ (a[slot, expert].double() @ x[pair // topk].double())
    chosen = configs(routing, 2 * experts, rank, hidden, columns, block_m)
    layer.gate_up(y, x, [a], [b], grouped(routing, 2, block_m), configs=chosen)
    close(y.view(-1, columns)[pairs], want)

    # the activation of twice as much, from the same buffer
    rows = y.view(-1, columns)
    activated = torch.empty(tokens * topk, columns // 2, device=CUDA, dtype=torch.bfloat16)
    order = torch.arange(tokens * topk, device=CUDA, dtype=torch.int32)
    routed = replace(grouped(routing, 2, block_m), pair_rows=order)
    layer.gate_up_swiglu(activated, rows, x, a, b, routed, 1.702, 7.0)
    twice = rows[pairs].double() + (want - before)
    gate, up = twice[:, 0::2].clamp(max=7.0), twice[:, 1::2].clamp(-7.0, 7.0)
    close(activated[pairs], gate * torch.sigmoid(1.702 * gate) * (up + 1.0))

    # the same rows are what down shrinks from, and its sums go to the tokens' rows
    first, second = random(2, experts, rank, columns), random(2, experts, hidden, rank)
    out = random(tokens, topk, hidden)
    want = out.view(-1, hidden)[pairs].double()
    for i, pair in enumerate(pairs):
        slot, expert = int(routing.token_slots[pair // topk]), int(routing.topk_ids.view(-1)[pair])
        delta = second[slot, expert].double() @ (first[slot, expert].double() @ rows[pair].double())
        want[i] += float(routing.topk_weights.view(-1)[pair]) * delta
    chosen = configs(routing, 2 * experts, rank, columns, hidden, block_m)
    layer.down(out, rows, [first], [second], grouped(routing, 2, block_m), configs=chosen)
    close(out.view(-1, hidden)[pairs], want)
