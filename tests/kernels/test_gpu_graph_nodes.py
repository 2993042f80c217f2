"""On a GPU: nodes of CUDA graphs that are switched off and on, between launches that may start early."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from bench import cases
from tests.kernels.test_gpu import LIMIT, SLOTS
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import slice_columns
from lorahost_kernels.vllm_026 import graph_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
MODULE, OTHER = 1, 2
BOTH = frozenset({MODULE, OTHER})
BLOCK = 256


@pytest.fixture(autouse=True)
def driver() -> Iterator[graph_nodes.CudaDriver]:
    """What an engine has from its start on, for one test."""
    kept, graph = graph_nodes.state, torch.cuda.CUDAGraph
    found = graph_nodes.CudaDriver()
    graph_nodes.state = graph_nodes.State(found)
    torch.cuda.CUDAGraph = graph_nodes.switched(graph)  # type: ignore[misc]
    yield found
    graph_nodes.state, torch.cuda.CUDAGraph = kept, graph  # type: ignore[misc]


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_check_passes_here(driver: graph_nodes.CudaDriver) -> None:
    graph_nodes.check(driver, torch.cuda.CUDAGraph)


@pytest.mark.parametrize("tokens", [1, 16, 64, 600])
def test_a_linear_layer_comes_and_goes(tokens: int) -> None:
    part = cases.dense_layer(2880, (4096, 512, 512), 32, tokens, SLOTS, SLOTS, CUDA, torch.bfloat16)
    base = part.y.clone()
    routing = part.routing

    def call() -> None:
        part.y.copy_(base)
        graph_nodes.run_for(MODULE, partial(layer.linear, part.y, part.x, part.lora_a, part.lora_b, routing))

    want = base.double()
    h = naive.shrink(part.x, part.lora_a, routing, False, torch.float64)
    naive.expand(want, h, part.lora_b, routing, slice_columns(part.lora_b), True, torch.float64)
    graph = capture(call)
    for touched in (None, BOTH, frozenset(), BOTH, frozenset({OTHER}), frozenset({MODULE})):
        if touched is not None:
            graph_nodes.touch(touched)
        graph.replay()
        if touched is None or MODULE in touched:
            error = torch.linalg.vector_norm(part.y.double() - want) / torch.linalg.vector_norm(want)
            assert error < LIMIT, touched
        else:
            assert torch.equal(part.y, base), touched


@triton.jit
def slow_copy(source, out, n, EARLY: tl.constexpr, WAIT: tl.constexpr, SPIN: tl.constexpr, BLOCK: tl.constexpr):
    """Some programs take much longer than others; EARLY: the next launch may start before anything is stored."""
    if WAIT:
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < n)
    noise = value * 0
    for _ in range(SPIN * (1 + (tl.program_id(0) * 7919) % 13)):
        noise = noise * 1.0000001 + 1e-30 * value
    tl.store(out + at, value + noise * 0, mask=at < n)


@triton.jit
def early_add(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    gdc_launch_dependents()
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@pytest.mark.parametrize("early", [False, True], ids=["writer ends", "writer lets the next start"])
@pytest.mark.parametrize("reader", ["add", "early_add"])
@pytest.mark.parametrize("modules", [1, 3])
def test_what_follows_waits_for_what_was_before(early: bool, reader: str, modules: int) -> None:
    """A node that is off must not let the launch behind it start before the one in front of it has ended."""
    n = 1 << 20
    grid = (n // BLOCK,)
    source, middle, out = (torch.zeros(n, device=CUDA) for _ in range(3))
    part = cases.dense_layer(2880, (32,), 32, 16, SLOTS, SLOTS, CUDA, torch.bfloat16)

    def call() -> None:
        slow_copy[grid](source, middle, n, early, early, 400, BLOCK, launch_pdl=early)
        for _ in range(modules):
            graph_nodes.run_for(MODULE, partial(layer.linear, part.y, part.x, part.lora_a, part.lora_b, part.routing))
        if reader == "add":
            torch.add(middle, 1, out=out)
        else:
            early_add[grid](middle, out, n, BLOCK, launch_pdl=True)

    graph = capture(call)
    for turn in range(200):
        graph_nodes.touch(frozenset() if turn % 3 else BOTH)
        source.fill_(float(turn))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.all(out == turn + 1), turn


def test_one_of_two_ways() -> None:
    x, out = torch.ones(1000, device=CUDA), torch.zeros(1000, device=CUDA)

    def call() -> None:
        out.zero_()
        graph_nodes.run_either(
            MODULE, lambda: [out.add_(x), out.mul_(2), out.add_(x)], lambda: torch.mul(x, 5, out=out)
        )
        out.add_(x)

    graph = capture(call)
    for touched, want in ((None, 4), (frozenset(), 6), (BOTH, 4), (frozenset({OTHER}), 6)):
        if touched is not None:
            graph_nodes.touch(touched)
        graph.replay()
        assert torch.all(out == want), touched


def test_many_graphs_follow_alone() -> None:
    out = torch.zeros(4, device=CUDA)
    graphs = [capture(partial(graph_nodes.run_for, MODULE, partial(out[i].add_, 1))) for i in range(4)]
    out.zero_()
    graph_nodes.touch(frozenset())
    graphs[1].replay()
    graph_nodes.touch(BOTH)
    for graph in graphs:
        graph.replay()
    assert out.tolist() == [1, 1, 1, 1]
    graphs[2].reset()
    del graphs[2]
    graph_nodes.touch(frozenset())
    for graph in graphs:
        graph.replay()
    assert out.tolist() == [1, 1, 1, 1]
