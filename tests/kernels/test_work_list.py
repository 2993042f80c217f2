"""The work list holds every pair with work once, in tiles of one (slot, expert) each."""

import pytest
import torch
from tests.kernels.lora_cases import CASES, DEVICE, Case, make

from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.work_list import naive
from lorahost_kernels.ops.work_list.launch import build_work_list, counts_for


def tiles(routing: Routing) -> list[tuple[int, list[int]]]:
    """[(key, pairs)] of each tile, as kernels read the tables."""
    work = routing.work
    assert work is not None
    table, order, limit = work.tile_table.tolist(), work.sorted_pairs.tolist(), work.max_tiles
    assert table[0] <= limit
    entries = [(table[1 + i], table[1 + limit + i], table[1 + 2 * limit + i]) for i in range(table[0])]
    return [(key, order[first : first + rows]) for key, first, rows in entries]


@pytest.mark.parametrize("block_m", [1, 4, 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_once_in_tiles_of_one_group(case: Case, block_m: int) -> None:
    routing = make(case, torch.float32, seed=1).routing
    found: dict[int, list[int]] = {}
    for key, pairs in tiles(build_work_list(routing, case.slots, block_m)):
        assert 1 <= len(pairs) <= block_m
        found.setdefault(key, []).extend(pairs)
    want = naive.build_work_list(routing, case.slots, block_m)
    assert {k: sorted(v) for k, v in found.items()} == dict(want)


def test_tiles_are_as_few_as_they_can_be() -> None:
    ids = torch.zeros(40, 1, dtype=torch.int32, device=DEVICE)
    routing = Routing(torch.zeros(40, dtype=torch.int32, device=DEVICE), torch.ones(1, device=DEVICE), 1, ids)
    assert [len(p) for _, p in tiles(build_work_list(routing, 1, 16))] == [16, 16, 8]


def test_counts_are_zero_after_each_build() -> None:
    for seed in range(3):
        build_work_list(make(CASES[0], torch.float32, seed).routing, CASES[0].slots, 16)
        assert not counts_for(DEVICE).any()


def test_no_rows_at_all() -> None:
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    routing = Routing(empty, torch.ones(3, dtype=torch.int32, device=DEVICE), 2, empty.view(0, 2))
    assert tiles(build_work_list(routing, 3, 16)) == []


def test_too_many_groups_are_refused() -> None:
    routing = make(CASES[0], torch.float32, seed=1).routing
    with pytest.raises(ValueError, match="slots \\* experts = 30000 is over the work list's limit of 16384"):
        build_work_list(routing, 10000, 16)
