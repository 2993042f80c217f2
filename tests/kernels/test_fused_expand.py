"""Expands that take over the step behind them, against float64; every row is written, with an adapter or without."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tests.kernels.lora_cases import CASES, DEVICE, DTYPES, TOLERANCE, Case, Inputs, make, relative_error

from lorahost_kernels import configs
from lorahost_kernels.configs import ExpandConfig, Launch, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive, replay
from lorahost_kernels.ops.expand_swiglu import naive as swiglu
from lorahost_kernels.ops.expand_swiglu.launch import expand_swiglu
from lorahost_kernels.ops.expand_topk_sum import naive as topk_sum
from lorahost_kernels.ops.expand_topk_sum.launch import expand_topk_sum

pytestmark = pytest.mark.usefixtures("poisoned_workspace")
# one slice; the layouts of several slices belong to gate_up_expand
ONE_SLICE = [replace(c, slices=1) for c in CASES if not c.swapped]
ALPHA, LIMIT = 1.702, 3.0
SHRINK = ShrinkConfig("pair", block_k=16, split_k=2, ranks=4, num_warps=2)
EXPANDS = [ExpandConfig("pair", block_n=n, num_warps=w) for n, w in ((16, 1), (32, 2), (64, 8), (128, 4), (512, 4))]


@pytest.fixture
def chooser() -> Iterator[Any]:
    """A table that says what it is told to, and which launches asked it."""

    class Chooser:
        said: ExpandConfig | None = None
        asked: list[Launch]

        def block_m(self, pairs: int, groups: int, rank: int) -> Literal[False]:
            return False

        def tiles(self, launch: Launch) -> ExpandConfig | None:
            self.asked.append(launch)
            return self.said if "expand" in launch.operation else None

    made = Chooser()
    made.asked = []
    yield made
    configs.use(None)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any], dict[str, Any], Any]]:
    """(programs, arguments, options, key) of each launch from here on."""
    seen: list[Any] = []
    real = replay.launch

    def record(kernel: Any, key: Any, pointers: Any, constants: Any) -> None:
        seen.append((*constants()[:3], key))
        real(kernel, key, pointers, constants)

    monkeypatch.setattr(replay, "launch", record)
    return seen


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


def test_the_references_leave_the_base_output_as_it_is() -> None:
    i = in_expert_order(make(ONE_SLICE[0], torch.float64, seed=6))
    y, before = i.y.flatten(0, 1), i.y.clone()
    h = naive.shrink(i.x, i.lora_a, i.routing, False, torch.float64)
    swiglu.expand_swiglu(torch.zeros_like(y[:, ::2]), y, h, i.lora_b[0], i.routing, ALPHA, LIMIT)
    assert torch.equal(i.y, before)
    i = in_expert_order(make(ONE_SLICE[0], torch.float64, seed=7, down=True))
    before = i.y.clone()
    h = naive.shrink(i.x, i.lora_a, i.routing, True, torch.float64)
    topk_sum.expand_topk_sum(torch.zeros_like(i.y[:, 0]), i.y, h, i.lora_b[0], i.routing)
    assert torch.equal(i.y, before)


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


@pytest.mark.parametrize("config", EXPANDS, ids=lambda c: f"{c.block_n}x{c.num_warps}")
@pytest.mark.parametrize("case", ONE_SLICE[:4], ids=str)
def test_gate_up_swiglu_with_given_tiles(case: Case, config: ExpandConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    i = in_expert_order(make(case, DTYPES[0], seed=4))
    y = i.y.flatten(0, 1)
    got = torch.full((len(y), y.shape[1] // 2), float("nan"), dtype=y.dtype, device=DEVICE)
    want = torch.full_like(got, float("nan"), dtype=torch.float64)
    h = naive.shrink(i.x, i.lora_a, i.routing, False, torch.float64)
    swiglu.expand_swiglu(want, y, h, i.lora_b[0], i.routing, ALPHA, LIMIT)
    seen = launched(monkeypatch)
    layer.gate_up_swiglu(got, y, i.x, i.lora_a[0], i.lora_b[0], i.routing, ALPHA, LIMIT, (SHRINK, config))
    assert torch.equal(want.isnan(), got.isnan())
    if len(y):
        assert relative_error(got.nan_to_num(), want.nan_to_num()) < TOLERANCE[DTYPES[0]]
        assert (seen[1][1]["BLOCK_N"], seen[1][2]["num_warps"]) == (max(16, config.block_n // 2), config.num_warps)
        assert seen[0][1]["RANKS"] == 4


@pytest.mark.parametrize("config", EXPANDS[:4], ids=lambda c: f"{c.block_n}x{c.num_warps}")
@pytest.mark.parametrize("case", ONE_SLICE[:4], ids=str)
def test_down_topk_sum_with_given_tiles(case: Case, config: ExpandConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    i = in_expert_order(make(case, DTYPES[0], seed=5, down=True))
    tokens, _, n = i.y.shape
    got = torch.full((tokens, n), float("nan"), dtype=i.y.dtype, device=DEVICE)
    want = torch.empty(tokens, n, dtype=torch.float64, device=DEVICE)
    h = naive.shrink(i.x, i.lora_a, i.routing, True, torch.float64)
    topk_sum.expand_topk_sum(want, i.y, h, i.lora_b[0], i.routing)
    seen = launched(monkeypatch)
    layer.down_topk_sum(got, i.y, i.x, i.lora_a[0], i.lora_b[0], i.routing, (SHRINK, config))
    assert relative_error(got, want) < TOLERANCE[DTYPES[0]]
    if tokens:
        assert (seen[1][1]["BLOCK_N"], seen[1][2]["num_warps"]) == (config.block_n, config.num_warps)


@pytest.mark.parametrize("rank", [4, 16, 32, 64, 128, 256])
def test_default_tiles(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a table and without a config."""
    seen: list[Any] = []
    monkeypatch.setattr(replay, "launch", lambda kernel, key, pointers, constants: seen.append(constants()))
    i = in_expert_order(make(Case("defaults", slices=1, rank=rank), DTYPES[0], seed=6, down=True))
    pairs, topk, padded = i.routing.num_pairs, i.routing.topk, configs.block_r(rank)
    h = torch.zeros(1, pairs, 1, rank, device=DEVICE)
    expand_topk_sum(i.y[:, 0].contiguous(), i.y, h, i.lora_b[0], i.routing)
    rows = i.y.flatten(0, 1)
    expand_swiglu(rows[:, ::2].contiguous(), rows, h, i.lora_b[0], i.routing, ALPHA, LIMIT)
    blocks = [max(16, min(64, 8192 // (configs.next_pow2(topk) * padded))), max(16, min(64, 2048 // padded))]
    assert [s.args["BLOCK_N"] for s in seen] == blocks
    assert [s.options["num_warps"] for s in seen] == [4, 4]


def test_the_active_table_is_asked_and_may_change(chooser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    i = in_expert_order(make(Case("asked", slices=1), DTYPES[0], seed=7, down=True))
    h = torch.randn(1, i.routing.num_pairs, 1, i.lora_b[0].shape[3], device=DEVICE)
    rows, seen = i.y.flatten(0, 1), launched(monkeypatch)

    def run() -> None:
        expand_topk_sum(i.y[:, 0].contiguous(), i.y, h, i.lora_b[0], i.routing)
        expand_swiglu(rows[:, ::2].contiguous(), rows, h, i.lora_b[0], i.routing, ALPHA, LIMIT)

    run()
    configs.use(chooser)
    chooser.said = ExpandConfig("pair", block_n=32, num_warps=1)
    run()
    assert [*dict.fromkeys(launch.operation for launch in chooser.asked)] == ["expand_topk_sum", "expand_swiglu"]
    assert {launch.columns for launch in chooser.asked} == {(i.lora_b[0].shape[2],)}
    assert [(s[1]["BLOCK_N"], s[2]["num_warps"]) for s in seen] == [(64, 4), (64, 4), (32, 1), (16, 1)]
    # a launch that is replayed by its key has the tiles of now
    assert len({s[3] for s in seen}) == 4


def test_tiles_that_hold_too_much_or_are_of_another_mode_are_refused() -> None:
    i = in_expert_order(make(Case("refused", slices=1, rank=256), DTYPES[0], seed=8, down=True))
    h = torch.zeros(1, i.routing.num_pairs, 1, 256, device=DEVICE)
    out = torch.empty_like(i.y[:, 0])
    for config in (ExpandConfig("pair", block_n=16), ExpandConfig("pair", block_n=8)):
        expand_topk_sum(out, i.y, h, i.lora_b[0], i.routing, config=config)
    with pytest.raises(ValueError, match="block_n=32 for 2 experts a token holds 16384 elements of 8192 at once"):
        expand_topk_sum(out, i.y, h, i.lora_b[0], i.routing, config=ExpandConfig("pair", block_n=32))
    with pytest.raises(ValueError, match="takes tiles of mode pair, got mode list"):
        expand_topk_sum(out, i.y, h, i.lora_b[0], i.routing, config=ExpandConfig("list"))
