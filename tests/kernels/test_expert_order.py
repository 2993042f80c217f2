"""The order by expert that the base GEMMs read, against plain torch, for every kind of routing."""

import dataclasses

import pytest
import torch
from tests.kernels.lora_cases import DEVICE
from torch import Tensor

from lorahost_kernels.ops.expert_order import naive
from lorahost_kernels.ops.expert_order.launch import ONE_PROGRAM, expert_order
from lorahost_kernels.ops.work_list.launch import counts_for


def routing(tokens: int, topk: int, experts: int, seed: int, lost: float = 0.0) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, and weights; a share `lost` of the pairs has expert -1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)]).to(torch.int32)
    ids[torch.rand(tokens, topk, generator=g) < lost] = -1
    return ids, torch.rand(tokens, topk, generator=g)


def check(ids: Tensor, weights: Tensor, experts: int, block_m: int) -> None:
    want = naive.expert_order(ids, weights, experts, block_m, torch.float16)
    got = expert_order(ids.to(DEVICE), weights.to(DEVICE), experts, block_m, torch.float16)
    rows = int(want.first_row[-1])
    for field in dataclasses.fields(want):
        a, b = getattr(want, field.name), getattr(got, field.name)
        if field.name == "row_weights":
            a, b = a[:rows], b[:rows]
        if isinstance(a, Tensor):
            assert torch.equal(a, b.cpu()), field.name


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(("topk", "experts"), [(4, 32), (2, 8), (6, 64), (1, 3), (8, 128)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 40])
def test_order(tokens: int, topk: int, experts: int, block_m: int) -> None:
    check(*routing(tokens, topk, experts, tokens), experts, block_m)


def test_pairs_of_other_ranks_are_left_out() -> None:
    check(*routing(19, 4, 8, 1, lost=0.5), 8, 16)
    check(*routing(3, 2, 8, 2, lost=1.0), 8, 16)


def test_one_expert_takes_all() -> None:
    check(torch.full((70, 1), 2, dtype=torch.int32), torch.rand(70, 1), 4, 16)


def test_no_pairs() -> None:
    check(torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 4), 8, 16)


def test_expert_ids_in_64_bits() -> None:
    ids, weights = routing(9, 4, 32, 5)
    check(ids.long(), weights, 32, 16)


@pytest.mark.parametrize(("topk", "experts"), [(4, 32), (6, 64)])
def test_many_pairs_take_three_launches(topk: int, experts: int) -> None:
    ids, weights = routing(ONE_PROGRAM // topk + 40, topk, experts, 3, lost=0.1)
    want = naive.expert_order(ids, weights, experts, 16, torch.float16)
    got = expert_order(ids.to(DEVICE), weights.to(DEVICE), experts, 16, torch.float16)
    for name in ("expert_rows", "first_row", "first_tile", "tile_map"):
        assert torch.equal(getattr(want, name), getattr(got, name).cpu()), name
    # any order within an expert will do, if all tables agree on it
    pair_rows, row_pairs, total = got.pair_rows.cpu().long(), got.row_pairs.cpu().long(), int(want.first_row[-1])
    routed = ids.flatten() >= 0
    assert torch.equal(row_pairs[pair_rows[routed]], routed.nonzero().flatten())
    assert (pair_rows[~routed] == -1).all()
    assert (row_pairs[total:] == -1).all()
    by_row = ids.flatten()[row_pairs[:total]]
    assert torch.equal(by_row, by_row.sort().values)
    assert torch.equal(got.row_weights.cpu()[:total], weights.flatten()[row_pairs[:total]].half())
    assert not counts_for(DEVICE).any()


def test_limits_are_named() -> None:
    ids = torch.zeros(8, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="at most 1024 experts, got 1025"):
        expert_order(ids, ids.float(), 1025, 16, torch.float16)
    with pytest.raises(ValueError, match="contiguous"):
        expert_order(ids[::2], ids.float()[::2], 4, 16, torch.float16)
