"""Shrink then expand, against float64, over every kind of batch; base rows unchanged bit for bit."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.lora_cases import CASES, DTYPES, TOLERANCE, Case, Inputs, make, relative_error, with_work_list

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import in_token_order, unweighted

pytestmark = pytest.mark.usefixtures("poisoned_workspace")
OPS = {"gate_up": layer.gate_up, "down": layer.down, "linear": layer.linear}
# several steps of K and N, several parts of K, and the switches that the defaults leave off
VARIANTS = {
    "pair steps": (ShrinkConfig("pair", block_k=16, split_k=2, ranks=4), ExpandConfig("pair", block_n=16, steps=2)),
    "pair atomic": (ShrinkConfig("pair", block_k=32, split_k=3, atomic=True), ExpandConfig("pair", block_n=32)),
    "list steps": (ShrinkConfig("list", block_k=16, split_k=2), ExpandConfig("list", block_n=16, steps=2, group=2)),
    "list atomic": (ShrinkConfig("list", block_k=32, split_k=2, atomic=True), ExpandConfig("list", block_n=32)),
}  # fmt: skip


def reference(op: str, i: Inputs, add_inputs: bool = True) -> torch.Tensor:
    """The product in float64, added to the base output before rounding."""
    y = i.y.double().clone()
    routing = i.routing if op == "down" else unweighted(i.routing)
    h = naive.shrink(i.x, i.lora_a, routing, op == "down", torch.float64)
    routing = in_token_order(routing) if op == "down" else routing
    naive.expand(y, h, i.lora_b, routing, i.columns, add_inputs, torch.float64)
    return y


def check(op: str, i: Inputs, dtype: torch.dtype, configs: layer.Configs | None, add_inputs: bool = True) -> None:
    """Runs the kernels on a copy of y and holds it against the reference."""
    want = reference(op, i, add_inputs)
    before = i.y.clone()
    OPS[op](i.y, i.x, i.lora_a, i.lora_b, i.routing, i.columns, add_inputs, configs)
    assert torch.equal(i.y[i.untouched], before[i.untouched])
    error = relative_error(i.y, want)
    assert error < TOLERANCE[dtype], f"{op}: error {error:.1e} against a limit of {TOLERANCE[dtype]:.0e}"


MODES = pytest.mark.parametrize("mode", ["pair", "list"])


def grouped(inputs: Inputs, mode: str, slots: int, block_m: int = 16) -> Inputs:
    """The inputs as they are, or with a work list."""
    return with_work_list(inputs, slots, block_m) if mode == "list" else inputs


@MODES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_up(case: Case, mode: str) -> None:
    check("gate_up", grouped(make(case, DTYPES[0], seed=1), mode, case.slots), DTYPES[0], None)


@MODES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_down(case: Case, mode: str) -> None:
    check("down", grouped(make(case, DTYPES[1], seed=2, down=True), mode, case.slots), DTYPES[1], None)


@MODES
@pytest.mark.parametrize("case", [c for c in CASES if not c.shared_a and c.rank == 8], ids=str)
def test_dense(case: Case, mode: str) -> None:
    check("linear", grouped(make(case, DTYPES[1], seed=3, dense=True), mode, case.slots), DTYPES[1], None)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", [c for c in CASES if "random mix" in c.name or "divide" in c.name], ids=str)
def test_tile_parameters(case: Case, variant: str) -> None:
    inputs = grouped(make(case, DTYPES[0], seed=4), variant[:4], case.slots)
    check("gate_up", inputs, DTYPES[0], VARIANTS[variant])


def in_expert_order(inputs: Inputs) -> Inputs:
    """The same pairs in another order of rows."""
    rows = torch.randperm(inputs.routing.num_pairs, generator=torch.Generator().manual_seed(3)).to(inputs.y.device)
    inputs.routing = replace(inputs.routing, pair_rows=rows.to(torch.int32))
    return inputs


@MODES
@pytest.mark.parametrize("case", [c for c in CASES if c.rank == 8 and not c.padded_rows], ids=str)
def test_gate_up_into_rows_ordered_by_expert(case: Case, mode: str) -> None:
    inputs = in_expert_order(make(case, DTYPES[0], seed=1))
    rows = inputs.routing.pair_rows
    assert rows is not None
    y, untouched = inputs.y.flatten(0, 1), inputs.untouched.flatten()
    inputs.y, inputs.untouched = torch.empty_like(y), torch.empty_like(untouched)
    inputs.y[rows.long()], inputs.untouched[rows.long()] = y, untouched
    check("gate_up", grouped(inputs, mode, case.slots), DTYPES[0], None)


@MODES
@pytest.mark.parametrize("case", [c for c in CASES if c.rank == 8], ids=str)
def test_down_from_rows_ordered_by_expert(case: Case, mode: str) -> None:
    check("down", grouped(in_expert_order(make(case, DTYPES[1], seed=2, down=True)), mode, case.slots), DTYPES[1], None)


def test_pair_rows_of_another_batch_are_refused() -> None:
    routing = make(Case("rows"), DTYPES[0], seed=1).routing
    with pytest.raises(ValueError, match=r"pair_rows must be int32 \(14,\), got torch.int32 \(13,\)"):
        replace(routing, pair_rows=torch.zeros(13, dtype=torch.int32))


@MODES
def test_dense_slices_of_unequal_width(mode: str) -> None:
    inputs = make(Case("qkv", width=96, slices=3, tokens=18), DTYPES[0], seed=4, dense=True)
    inputs.lora_b = [b[:, :, :n] for b, n in zip(inputs.lora_b, (96, 24, 40), strict=True)]
    inputs.columns = [0, 96, 120]
    inputs.y = inputs.y[:, :160]
    check("linear", grouped(inputs, mode, 3, 32), DTYPES[0], None)


@MODES
def test_output_overwritten_instead_of_added_to(mode: str) -> None:
    inputs = make(Case("overwrite", slots_of=lambda m: [0] * m), DTYPES[0], seed=5)
    inputs.y.fill_(float("nan"))
    check("gate_up", grouped(inputs, mode, 3), DTYPES[0], None, add_inputs=False)


def cut_to_ranks(inputs: Inputs, ranks: tuple[int, ...]) -> None:
    """Zeros behind the rank of each slot's adapter, as vLLM's slot buffers have them."""
    for slot, rank in enumerate(ranks):
        for a, b in zip(inputs.lora_a, inputs.lora_b, strict=True):
            a[slot, :, rank:] = 0
            b[slot, :, :, rank:] = 0


def test_mixed_ranks_are_zero_padded_rows() -> None:
    inputs = make(Case("mixed", rank=16, slots_of=lambda m: [s % 3 for s in range(m)]), DTYPES[0], seed=6)
    cut_to_ranks(inputs, (4, 8, 16))
    check("gate_up", inputs, DTYPES[0], None)


@MODES
@pytest.mark.parametrize("op", OPS)
def test_ranks_from_4_to_256_in_one_batch(op: str, mode: str) -> None:
    ranks = (4, 16, 64, 256)
    case = Case("to 256", tokens=5, experts=2, slots=4, hidden=32, width=32, rank=256,
                slots_of=lambda m: [2, 0, -1, 3, 1])  # fmt: skip
    # the default's two ranks a program take minutes in the interpreter
    few_programs = (ShrinkConfig("pair", block_k=32, ranks=64), ExpandConfig("pair", block_n=32))
    dtype = DTYPES[0] if op == "gate_up" else DTYPES[1]
    inputs = make(case, dtype, seed=10, down=op == "down", dense=op == "linear")
    cut_to_ranks(inputs, ranks)
    want, routing = reference(op, inputs), inputs.routing
    check(op, grouped(inputs, mode, case.slots), dtype, few_programs if mode == "pair" else None)
    # one by one, since the outputs of rank 256 outweigh those of rank 4
    for slot in range(-1, len(ranks)):
        rows = routing.token_slots == slot
        assert rows.any()
        assert relative_error(inputs.y[rows], want[rows]) < TOLERANCE[dtype], f"slot {slot}"


def test_one_token_alone_gives_what_it_gives_in_a_batch() -> None:
    case = Case("batch", tokens=6, slots_of=lambda m: [0, 1, 2, 0, 1, 2])
    together, alone = make(case, DTYPES[0], seed=7), make(case, DTYPES[0], seed=7)
    layer.gate_up(together.y, together.x, together.lora_a, together.lora_b, together.routing)
    r = alone.routing
    assert r.topk_ids is not None
    one = replace(r, token_slots=r.token_slots[3:4], topk_ids=r.topk_ids[3:4])
    layer.gate_up(alone.y[3:4], alone.x[3:4], alone.lora_a, alone.lora_b, one)
    assert torch.equal(alone.y[3], together.y[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: setattr(i, "x", i.x[:, :-1]), r"x: want \(7, 80\)"),
        (lambda i: setattr(i, "y", i.y[..., :-1]), r"y: want \(7, 2, 96\)"),
        (lambda i: setattr(i, "lora_a", [a.half() for a in i.lora_a]), "dtype torch.float16 differs"),
        (lambda i: setattr(i, "lora_a", [*i.lora_a, *i.lora_a, *i.lora_a]), "1 to 4 slices are supported, got 6"),
        (lambda i: setattr(i, "lora_b", [b[:, :2] for b in i.lora_b]), r"want \(slots, experts=3"),
    ],
    ids=["x columns", "y columns", "dtype", "slices", "experts"],
)
def test_wrong_arguments_are_refused(change: object, message: str) -> None:
    inputs = make(Case("refused"), torch.float32, seed=8)
    change(inputs)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        layer.gate_up(inputs.y, inputs.x, inputs.lora_a, inputs.lora_b, inputs.routing)


def test_list_mode_without_a_work_list_is_refused() -> None:
    inputs = make(Case("no list"), DTYPES[0], seed=9)
    with pytest.raises(ValueError, match="needs a work list of block_m=16"):
        layer.gate_up(inputs.y, inputs.x, inputs.lora_a, inputs.lora_b, inputs.routing, configs=VARIANTS["list steps"])
