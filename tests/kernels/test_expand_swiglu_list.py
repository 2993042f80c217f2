"""expand_swiglu by the tiles of a work list, against float64; rows in no tile have no adapter, and are written too."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.lora_cases import CASES, DEVICE, DTYPES, TOLERANCE, Case, Inputs, make, relative_error
from tests.kernels.test_fused_expand import in_expert_order
from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import pair_keys
from lorahost_kernels.ops.expand_swiglu import naive as swiglu
from lorahost_kernels.ops.expand_swiglu.launch import BASE_PAIRS, expand_swiglu
from lorahost_kernels.ops.work_list.launch import build_work_list

pytestmark = pytest.mark.usefixtures("poisoned_workspace")
ALPHA, LIMIT = 1.702, 3.0
# one slice, gate and up alternate; width counts both
ONE_SLICE = [replace(c, slices=1) for c in CASES if not c.swapped]
MIX = Case(
    "all kinds of rows",
    tokens=40,
    slots=4,
    slices=1,
    slots_of=lambda m: [(0, -1, 1, 4, 3, 2, 0, 99)[i % 8] for i in range(m)],
    experts_of=lambda m, k: [[-1 if i % 5 == 4 else 0, 1 + i % 2] for i in range(m)],
    disabled=(3,),
)
LISTS = {
    "steps": ExpandConfig("list", 16, 32, 2, 4, 2),
    "one step": ExpandConfig("list", 16, 64, 1, 4, 1),
    "deep pipeline": ExpandConfig("list", 16, 32, 3, 4, 4),
    "groups": ExpandConfig("list", 16, 32, 1, 4, 2, group=8),
    "32 rows": ExpandConfig("list", 32, 64, 2, 4, 3),
    "64 rows": ExpandConfig("list", 64, 64, 15, 2, 4),
    "wide": ExpandConfig("list", 32, 128, 1, 4, 2),
}


def grouped(i: Inputs, block_m: int = 16) -> Inputs:
    """The inputs with rows in another order than pairs, and a work list; y holds NaN in rows of no pair.

    The pair of row 0 loses it, whether it has an adapter or not; y is finite there, so that a stray write shows.
    """
    i = in_expert_order(i)
    rows = i.routing.pair_rows
    assert rows is not None
    if len(rows) > 1:
        rows = torch.where(rows == 0, -1, rows)
        i.routing = replace(i.routing, pair_rows=rows)
    i.y = i.y.flatten(0, 1)
    owned = torch.zeros(len(i.y), dtype=torch.bool, device=DEVICE)
    owned[rows[rows >= 0].long()] = True
    owned[0] = True
    i.y[~owned] = float("nan")
    i.routing = build_work_list(i.routing, i.lora_b[0].shape[0], block_m)
    return i


def output(y: Tensor) -> Tensor:
    """All NaN, behind a row that is not its own: row -1 is no row."""
    return torch.full((1 + len(y), y.shape[1] // 2), float("nan"), dtype=y.dtype, device=DEVICE)[1:]


def reference(i: Inputs, h: Tensor) -> Tensor:
    """In float64, NaN in rows of no pair."""
    ids, rows = i.routing.topk_ids, i.routing.pair_rows
    assert ids is not None
    assert rows is not None
    routing = replace(i.routing, topk_ids=torch.where(rows.view_as(ids) < 0, -1, ids))
    want = output(i.y).double()
    swiglu.expand_swiglu(want, i.y, h, i.lora_b[0], routing, ALPHA, LIMIT)
    return want


def compare(got: Tensor, want: Tensor, i: Inputs, before: Tensor) -> None:
    """The rows of pairs are right, the others untouched, and y is as it was, bit for bit."""
    written = ~want.isnan()
    rows = i.routing.pair_rows
    assert rows is not None
    assert int(written.all(1).sum()) == int((rows >= 0).sum())
    assert torch.equal(written, ~got.isnan())
    assert got._base is not None
    assert got._base[0].isnan().all()
    if written.any():
        assert relative_error(got[written], want[written]) < TOLERANCE[got.dtype]
    assert torch.equal(i.y.nan_to_num(12345.0), before.nan_to_num(12345.0))


def check(i: Inputs, splits: int, **how: Any) -> None:
    """The expand alone, from partial sums that hold NaN for pairs without work."""
    got = output(i.y)
    pairs, rank = i.routing.num_pairs, i.lora_b[0].shape[3]
    h = torch.randn(splits, pairs, 1, rank, generator=torch.Generator().manual_seed(5)).to(DEVICE) / rank**0.5
    h[:, pair_keys(i.routing, i.lora_b[0].shape[0]) < 0] = float("nan")
    want, before = reference(i, h), i.y.clone()
    expand_swiglu(got, i.y, h, i.lora_b[0], i.routing, ALPHA, LIMIT, **how)
    compare(got, want, i, before)


def check_product(i: Inputs) -> None:
    """Shrink and expand with the default tiles."""
    got, before = output(i.y), i.y.clone()
    want = reference(i, naive.shrink(i.x, i.lora_a, i.routing, False, torch.float64))
    layer.gate_up_swiglu(got, i.y, i.x, i.lora_a[0], i.lora_b[0], i.routing, ALPHA, LIMIT)
    compare(got, want, i, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*ONE_SLICE, MIX], ids=str)
def test_gate_up_swiglu(case: Case, dtype: torch.dtype) -> None:
    check_product(grouped(make(case, dtype, seed=1)))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("tiles", LISTS)
def test_tiles(tiles: str, splits: int) -> None:
    config = LISTS[tiles]
    check(grouped(make(replace(MIX, width=2 * 72), DTYPES[0], seed=2), config.block_m), splits, config=config)


@pytest.mark.parametrize("width", [2 * 2880, 2 * 24, 2 * 31, 2 * 64])
def test_widths(width: int) -> None:
    check(grouped(make(replace(MIX, tokens=12, width=width), DTYPES[0], seed=3)), 2)


@pytest.mark.parametrize("warps", [2, 4])
def test_more_base_rows_than_one_program_takes(warps: int) -> None:
    tokens = BASE_PAIRS + 7
    case = replace(MIX, tokens=tokens, slots_of=lambda m: [-1] * (m - 2) + [0, 2], width=2 * 520)
    check(grouped(make(case, DTYPES[0], seed=4)), 1, config=ExpandConfig("list", 16, 64, 4, warps, 2))


def test_mixed_ranks_are_zero_padded() -> None:
    ranks = (4, 8, 32, 256)
    case = replace(MIX, rank=256, hidden=32, disabled=(), slots_of=lambda m: [i % 5 - 1 for i in range(m)])
    i = grouped(make(case, DTYPES[0], seed=5))
    for slot, rank in enumerate(ranks):
        i.lora_a[0][slot, :, rank:] = 0
        i.lora_b[0][slot, :, :, rank:] = 0
    check_product(i)


def test_an_adapter_without_weights_for_the_module_leaves_its_list_rows_to_the_base_programs() -> None:
    i = grouped(make(replace(MIX, disabled=()), DTYPES[0], seed=6))
    enabled = i.routing.adapter_enabled.clone()
    enabled[2] = 0
    i.lora_b[0][2] = float("nan")
    i.routing = replace(i.routing, adapter_enabled=enabled)
    check(i, 1)


def test_tiles_that_the_list_does_not_have_are_refused() -> None:
    i = grouped(make(MIX, DTYPES[0], seed=7))
    with pytest.raises(ValueError, match="needs a work list of block_m=32, have 16"):
        check(i, 1, config=LISTS["32 rows"])
    with pytest.raises(ValueError, match="takes tiles of mode list"):
        check(i, 1, config=ExpandConfig("pair"))
    i.routing = replace(i.routing, work=None)
    with pytest.raises(ValueError, match="needs a work list of block_m=16, have None"):
        check(i, 1, config=LISTS["steps"])


@pytest.mark.parametrize("tiles", LISTS)
def test_the_product_takes_given_tiles(tiles: str) -> None:
    config = LISTS[tiles]
    i = grouped(make(replace(MIX, width=2 * 72), DTYPES[0], seed=8), config.block_m)
    got, before = output(i.y), i.y.clone()
    want = reference(i, naive.shrink(i.x, i.lora_a, i.routing, False, torch.float64))
    both = (ShrinkConfig("list", config.block_m, 16, 2, 0, 4, 2), config)
    layer.gate_up_swiglu(got, i.y, i.x, i.lora_a[0], i.lora_b[0], i.routing, ALPHA, LIMIT, both)
    compare(got, want, i, before)
