"""On a GPU: real shapes against float64, repeated runs, CUDA graphs whose inputs change, launches chained by PDL."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bench import cases

from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import slice_columns, unweighted
from lorahost_kernels.ops.expand_swiglu import naive as swiglu
from lorahost_kernels.ops.work_list.launch import build_work_list

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned_workspace"),
]
LIMIT = 5e-3
SLOTS = 8
CUDA = torch.device("cuda")
TOKENS = (1, 2, 5, 16, 17, 33, 64, 100, 256, 600, 1600, 8192, 16384)


def reference(part: cases.Layer, down: bool) -> torch.Tensor:
    """The layer's output in float64."""
    routing = part.routing if down else unweighted(part.routing)
    y = part.y.double()
    h = naive.shrink(part.x, part.lora_a, routing, down, torch.float64)
    naive.expand(y, h, part.lora_b, routing, slice_columns(part.lora_b), True, torch.float64)
    return y


def step(gate_up: cases.Layer, down: cases.Layer) -> None:
    """What an engine does in each layer: group the rows where that pays, then both products."""
    slots, experts, rank, _ = gate_up.lora_a[0].shape
    block_m = work_block_m(gate_up.routing.num_pairs, slots * experts, rank)
    routing = gate_up.routing if block_m is None else build_work_list(gate_up.routing, slots, block_m)
    layer.gate_up(gate_up.y, gate_up.x, gate_up.lora_a, gate_up.lora_b, routing)
    layer.down(down.y, down.x, down.lora_a, down.lora_b, routing)


def mixed(shape: cases.MoeShape, tokens: int, dtype: torch.dtype, seed: int) -> tuple[cases.Layer, cases.Layer]:
    """A layer whose batch has base rows, stale slots, a disabled adapter and experts -1."""
    torch.manual_seed(seed)
    gate_up, down = cases.moe_layer(shape, tokens, SLOTS, SLOTS, CUDA, dtype)
    routing = gate_up.routing
    routing.token_slots[torch.rand(tokens, device=CUDA) < 0.1] = -1
    routing.token_slots[torch.rand(tokens, device=CUDA) < 0.05] = 77
    routing.adapter_enabled[5] = 0
    assert routing.topk_ids is not None
    routing.topk_ids[torch.rand(routing.topk_ids.shape, device=CUDA) < 0.02] = -1
    for w in (*gate_up.lora_a, *gate_up.lora_b, *down.lora_a, *down.lora_b):
        w[5] = float("nan")
    return gate_up, down


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """||out - want|| / ||want||."""
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gpt_oss_layer(tokens: int, dtype: torch.dtype) -> None:
    for seed in (1, 2):
        parts = mixed(cases.MOE["gpt-oss-20b"], tokens, dtype, seed)
        wants = [reference(part, i == 1) for i, part in enumerate(parts)]
        step(*parts)
        for part, want in zip(parts, wants, strict=True):
            assert error(part.y, want) < LIMIT


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300, 2048, 8192, 16384])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "article-figure-1"])
def test_other_moe_layers(name: str, tokens: int) -> None:
    parts = mixed(cases.MOE[name], tokens, torch.bfloat16, seed=3)
    wants = [reference(part, i == 1) for i, part in enumerate(parts)]
    step(*parts)
    for part, want in zip(parts, wants, strict=True):
        assert error(part.y, want) < LIMIT


@pytest.mark.parametrize("rank", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("tokens", [16, 700])
def test_ranks(rank: int, tokens: int) -> None:
    shape = replace(cases.MOE["gpt-oss-20b"], experts=8, rank=rank)
    parts = mixed(shape, tokens, torch.bfloat16, seed=4)
    wants = [reference(part, i == 1) for i, part in enumerate(parts)]
    step(*parts)
    for part, want in zip(parts, wants, strict=True):
        assert error(part.y, want) < LIMIT


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 1600, 8192, 16384])
@pytest.mark.parametrize("name", cases.DENSE)
def test_dense_layers(name: str, tokens: int) -> None:
    shape = cases.DENSE[name]
    for k, widths in shape.modules.values():
        part = cases.dense_layer(k, widths, 32, tokens, SLOTS, SLOTS, CUDA, torch.bfloat16)
        want = reference(part, True)
        block_m = work_block_m(tokens, SLOTS, 32)
        routing = part.routing if block_m is None else build_work_list(part.routing, SLOTS, block_m)
        layer.linear(part.y, part.x, part.lora_a, part.lora_b, routing)
        assert error(part.y, want) < LIMIT


@pytest.mark.parametrize("tokens", [16, 64, 1600])
def test_repeated_runs_agree_bit_for_bit(tokens: int) -> None:
    parts = mixed(cases.MOE["gpt-oss-20b"], tokens, torch.bfloat16, seed=5)
    bases = [part.y.clone() for part in parts]
    first: list[torch.Tensor] = []
    holes = []
    for run in range(1000):
        for part, base in zip(parts, bases, strict=True):
            part.y.copy_(base)
        holes.append(torch.empty(1 + 997 * (run % 200), device=CUDA))  # other addresses for the workspace each time
        step(*parts)
        if not first:
            first = [part.y.clone() for part in parts]
        assert all(torch.equal(part.y, f) for part, f in zip(parts, first, strict=True))


@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_cuda_graph_follows_its_inputs(tokens: int) -> None:
    shape = cases.MOE["gpt-oss-20b"]
    parts = mixed(shape, tokens, torch.bfloat16, seed=6)
    step(*parts)
    graph = captured(lambda: step(*parts))
    routing = parts[0].routing
    assert routing.topk_ids is not None
    for seed in range(5):
        torch.manual_seed(seed)
        routing.token_slots.copy_(torch.randint(-1, 5, (tokens,)))
        routing.topk_ids.copy_(cases.random_topk(tokens, shape.experts, shape.topk, CUDA)[0])
        for part in parts:
            part.x.normal_()
            part.y.normal_()
            part.lora_b[0][seed % 4].normal_()
        wants = [reference(part, i == 1) for i, part in enumerate(parts)]
        graph.replay()
        for part, want in zip(parts, wants, strict=True):
            assert error(part.y, want) < LIMIT


def rows_by_expert(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """int32 (pairs,): the row of each pair when rows are sorted by expert; -1 for expert -1."""
    flat = ids.flatten()
    order = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device)
    return torch.where(flat < 0, -1, rows)


class Activated:
    """gate_up with the activation in its expand: one layer's inputs, its output, and both in float64."""

    def __init__(self, shape: cases.MoeShape, tokens: int, dtype: torch.dtype, seed: int) -> None:
        self.part, _ = mixed(shape, tokens, dtype, seed)
        self.y, self.ids = self.part.y.flatten(0, 1), self.part.routing.topk_ids
        assert self.ids is not None
        self.routing = replace(self.part.routing, pair_rows=rows_by_expert(self.ids, shape.experts))
        self.out = torch.full((len(self.y), self.y.shape[1] // 2), float("nan"), dtype=dtype, device=CUDA)

    def step(self) -> None:
        """The work list where the batch wants one, then the product."""
        slots, experts, rank, _ = self.part.lora_a[0].shape
        block_m = work_block_m(self.routing.num_pairs, slots * experts, rank)
        routing = self.routing if block_m is None else build_work_list(self.routing, slots, block_m)
        layer.gate_up_swiglu(self.out, self.y, self.part.x, self.part.lora_a[0], self.part.lora_b[0], routing, 1.702, 7)

    def check(self) -> None:
        """All rows of pairs are right, no others are written."""
        want = torch.full_like(self.out, float("nan"), dtype=torch.float64)
        h = naive.shrink(self.part.x, self.part.lora_a, self.routing, False, torch.float64)
        swiglu.expand_swiglu(want, self.y, h, self.part.lora_b[0], self.routing, 1.702, 7)
        written = ~want.isnan()
        assert torch.equal(written, ~self.out.isnan())
        assert error(self.out[written], want[written]) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [16, 200, 600, 1600, 8192])
def test_gpt_oss_activation_in_the_expand(tokens: int, dtype: torch.dtype) -> None:
    case = Activated(cases.MOE["gpt-oss-20b"], tokens, dtype, seed=7)
    before = case.y.clone()
    case.step()
    case.check()
    assert torch.equal(case.y, before)
    first = case.out.clone().nan_to_num(1e4)
    for _ in range(20):
        case.out.fill_(float("nan"))
        case.step()
        assert torch.equal(case.out.nan_to_num(1e4), first)


@pytest.mark.parametrize("rank", [8, 64, 128, 256])
def test_ranks_of_the_activation_in_the_expand(rank: int) -> None:
    case = Activated(replace(cases.MOE["gpt-oss-20b"], experts=8, rank=rank), 1600, torch.bfloat16, seed=8)
    case.step()
    case.check()


def test_cuda_graph_of_the_activation_in_the_expand_follows_its_inputs() -> None:
    tokens, shape = 600, cases.MOE["gpt-oss-20b"]
    case = Activated(shape, tokens, torch.bfloat16, seed=9)
    case.step()
    graph = captured(case.step)
    for seed in range(3):
        torch.manual_seed(seed)
        # from all base rows to none
        case.routing.token_slots.copy_(torch.randint(-1, 5, (tokens,)).clamp(max=(-1, 4, 4)[seed]))
        case.routing.token_slots.clamp_(min=(-1, -1, 0)[seed])
        ids = cases.random_topk(tokens, shape.experts, shape.topk, CUDA)[0]
        case.ids.copy_(ids)
        case.routing.pair_rows.copy_(rows_by_expert(ids, shape.experts))
        case.y.normal_()
        case.out.fill_(float("nan"))
        graph.replay()
        case.check()


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of the call's launches."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
