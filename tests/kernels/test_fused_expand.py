"""Expands that take over the step behind them, against float64; every row is written, with an adapter or without."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.lora_cases import CASES, DEVICE, DTYPES, TOLERANCE, Case, Inputs, make, relative_error

from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.expand_swiglu import naive as swiglu
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.expand_topk_sum import naive as topk_sum
from lorahost_kernels.ops.expand_topk_sum.launch import expand_topk_sum

pytestmark = pytest.mark.usefixtures("poisoned_workspace")
# one slice; the layouts of several slices belong to gate_up_expand
ONE_SLICE = [replace(c, slices=1) for c in CASES if not c.swapped]
ALPHA, LIMIT = 1.702, 3.0


def in_expert_order(inputs: Inputs) -> Inputs:
    """The pairs in another order of rows; pairs of expert -1 have none."""
    ids = inputs.routing.topk_ids
    assert ids is not None
    rows = torch.randperm(inputs.routing.num_pairs, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rows = torch.where(ids.flatten() >= 0, rows, -1)
    inputs.routing = replace(inputs.routing, pair_rows=rows.to(torch.int32))
    return inputs


@pytest.mark.parametrize("case", ONE_SLICE, ids=str)
def test_gate_up_swiglu(case: Case) -> None:
    i = in_expert_order(make(case, DTYPES[0], seed=1))
    y = i.y.flatten(0, 1)
    pairs, width = y.shape
    got = torch.full((pairs, width // 2), float("nan"), dtype=y.dtype, device=DEVICE)
    want = torch.full((pairs, width // 2), float("nan"), dtype=torch.float64, device=DEVICE)
    h = naive.shrink(i.x, i.lora_a, i.routing, False, torch.float64)
    swiglu.expand_swiglu(want, y, h, i.lora_b[0], i.routing, ALPHA, LIMIT)
    layer.gate_up_swiglu(got, y, i.x, i.lora_a[0], i.lora_b[0], i.routing, ALPHA, LIMIT)
    written = ~want.isnan()
    assert torch.equal(written, ~got.isnan())
    if written.any():
        assert relative_error(got[written], want[written]) < TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("case", ONE_SLICE, ids=str)
def test_down_topk_sum(case: Case) -> None:
    i = in_expert_order(make(case, DTYPES[1], seed=2, down=True))
    ids = i.routing.topk_ids
    assert ids is not None
    i.y[ids < 0] = float("nan")
    tokens, _, n = i.y.shape
    got = torch.full((tokens, n), float("nan"), dtype=i.y.dtype, device=DEVICE)
    want = torch.empty(tokens, n, dtype=torch.float64, device=DEVICE)
    h = naive.shrink(i.x, i.lora_a, i.routing, True, torch.float64)
    topk_sum.expand_topk_sum(want, i.y, h, i.lora_b[0], i.routing)
    layer.down_topk_sum(got, i.y, i.x, i.lora_a[0], i.lora_b[0], i.routing)
    assert relative_error(got, want) < TOLERANCE[DTYPES[1]]


def test_wrong_arguments_are_refused() -> None:
    i = make(Case("refused", slices=1), DTYPES[0], seed=3, down=True)
    h = torch.zeros(1, i.routing.num_pairs, 1, 8, device=DEVICE)
    out = torch.empty_like(i.y[:, 0])
    with pytest.raises(ValueError, match="needs topk_ids and pair_rows"):
        expand_swiglu(out, i.y.flatten(0, 1), h, i.lora_b[0], i.routing, ALPHA, LIMIT)
    with pytest.raises(ValueError, match=r"h \(splits, 14, 1, 8\), got \(1, 13, 1, 8\)"):
        expand_topk_sum(out, i.y, h[:, 1:].contiguous(), i.lora_b[0], i.routing)
    with pytest.raises(ValueError, match=r"want y \(7, 2, 48\) and out \(7, 48\)"):
        expand_topk_sum(out[1:], i.y, h, i.lora_b[0], i.routing)
