"""Dense products by the lists that the host makes once a step, for a batch shorter than the lists' room."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.lora_cases import DEVICE, DTYPES, TOLERANCE, Case, make, relative_error

from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.vllm_026 import dense_lists

ROOM = 96
pytestmark = pytest.mark.usefixtures("poisoned_workspace")


@pytest.mark.parametrize("height", dense_lists.HEIGHTS)
@pytest.mark.parametrize(
    "slots_of",
    [lambda m: [2] * m, lambda m: [-1] * m, lambda m: [(0, -1, 2, 2, 2)[i % 5] for i in range(m)]],
    ids=["one adapter", "no adapter", "mixed"],
)
def test_dense_product(slots_of: object, height: int) -> None:
    case = Case("step", tokens=40, slots_of=slots_of)  # type: ignore[arg-type]
    inputs = make(case, DTYPES[0], seed=5, dense=True)
    slots = np.array(case.slots_of(40) if case.slots_of else [])
    with_adapter, counts = np.unique(slots[slots >= 0], return_counts=True)
    order = np.argsort(slots, kind="stable")[int((slots < 0).sum()) :]
    buffer = np.full(dense_lists.buffer_size(ROOM, case.slots), 1 << 20, dtype=np.int32)
    dense_lists.fill(buffer, order, with_adapter, counts, ROOM, case.slots)
    work = dense_lists.work_list(torch.from_numpy(buffer).to(DEVICE), 40, ROOM, case.slots, height)
    assert work is not None
    want = inputs.y.double()
    h = naive.shrink(inputs.x, inputs.lora_a, inputs.routing, False, torch.float64)
    naive.expand(want, h, inputs.lora_b, inputs.routing, inputs.columns, True, torch.float64)
    before = inputs.y.clone()
    layer.linear(inputs.y, inputs.x, inputs.lora_a, inputs.lora_b, replace(inputs.routing, work=work), inputs.columns)
    assert torch.equal(inputs.y[inputs.untouched], before[inputs.untouched])
    assert relative_error(inputs.y, want) < TOLERANCE[DTYPES[0]]
