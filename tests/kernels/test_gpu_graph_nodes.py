"""On a GPU: CUDA graphs that are built anew without some launches, between launches that may start early."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from bench import cases
from tests.kernels.test_gpu import LIMIT, SLOTS

from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import naive
from lorahost_kernels.ops.common.routing import slice_columns
from lorahost_kernels.vllm_026 import graph_nodes, pdl_chain
from lorahost_kernels.vllm_026.graph_driver import CudaDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
MODULE, OTHER = 1, 2
BOTH = frozenset({MODULE, OTHER})


@pytest.fixture(autouse=True)
def driver() -> Iterator[CudaDriver]:
    """What an engine has from its start on, for one test."""
    kept, graph = graph_nodes.state, torch.cuda.CUDAGraph
    found = CudaDriver()
    graph_nodes.state = graph_nodes.State(found)
    torch.cuda.CUDAGraph = graph_nodes.following(graph)  # type: ignore[misc]
    yield found
    graph_nodes.state, torch.cuda.CUDAGraph = kept, graph  # type: ignore[misc]


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_check_passes_here(driver: CudaDriver) -> None:
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
            graph_nodes.set_touched(BOTH, touched)
        graph.replay()
        if touched is None or MODULE in touched:
            error = torch.linalg.vector_norm(part.y.double() - want) / torch.linalg.vector_norm(want)
            assert error < LIMIT, touched
        else:
            assert torch.equal(part.y, base), touched


@triton.jit
def hasty_add(x, out, BLOCK: tl.constexpr):
    """Reads without waiting for the launch in front of it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + 1)


class HastyChain(pdl_chain.Chain):
    """Nothing is left out, and the reader doesn't wait."""

    def launch(self) -> None:
        grid = (self.programs,)
        pdl_chain.late_copy[grid](self.source, self.middle, pdl_chain.SPIN, pdl_chain.BLOCK, launch_pdl=True)
        hasty_add[grid](self.middle, self.out, pdl_chain.BLOCK, launch_pdl=True)
        torch.add(self.out, 1, out=self.last)


def test_the_chain_shows_a_reader_that_does_not_wait() -> None:
    chain = HastyChain(lambda launch: launch())
    graph = capture(chain.launch)
    assert any("before they were written, by reader 1" in chain.problem(graph.replay, False) for _ in range(20))


@pytest.mark.parametrize("pdl", [False, True], ids=["reader", "reader that may start early"])
@pytest.mark.parametrize("modules", [1, 3])
def test_what_follows_waits_for_what_was_before(modules: int, pdl: bool) -> None:
    """Without the node between them a launch must not start before the one in front of it has ended."""

    def optional(launch: Callable[[], object]) -> None:
        for i in range(modules):
            graph_nodes.run_for(MODULE, launch if i == 0 else another)

    part = cases.dense_layer(2880, (32,), 32, 16, SLOTS, SLOTS, CUDA, torch.bfloat16)
    another = partial(layer.linear, part.y, part.x, part.lora_a, part.lora_b, part.routing)
    chain = pdl_chain.Chain(optional, pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.launch()
    for turn in range(200):
        touched = turn % 3 == 0
        graph_nodes.set_touched(BOTH, BOTH if touched else frozenset())
        assert chain.problem(graph.replay, touched) == "", turn


def test_edges_of_both_kinds_are_copied(driver: CudaDriver) -> None:
    chain = pdl_chain.Chain(partial(graph_nodes.run_for, MODULE))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.launch()
    kinds = driver._edge_kinds(graph.raw_cuda_graph())
    early = kinds.total() - kinds[0]
    assert (kinds[0], early) == (1, 4), "of this chain one launch may not start early"
    copy = driver.copy(graph.raw_cuda_graph())
    assert driver._edge_kinds(copy) == kinds
    driver.destroy(copy)


def test_a_hundred_builds_with_replays_in_flight() -> None:
    out, x = torch.zeros(1 << 20, device=CUDA), torch.ones(1 << 20, device=CUDA)
    graph = capture(lambda: [out.add_(x), graph_nodes.run_for(MODULE, partial(out.add_, x, alpha=2)), out.add_(x)])
    out.zero_()
    want = 0
    for turn in range(100):
        touched = turn % 3 == 0
        graph_nodes.set_touched(BOTH, BOTH if touched else frozenset())
        graph.replay()
        want += 4 if touched else 2
    assert torch.all(out == want)
    assert graph_nodes.report()["builds"] >= 66


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
            graph_nodes.set_touched(BOTH, touched)
        graph.replay()
        assert torch.all(out == want), touched


def test_many_graphs_follow_alone() -> None:
    out = torch.zeros(4, device=CUDA)
    graphs = [capture(partial(graph_nodes.run_for, MODULE, partial(out[i].add_, 1))) for i in range(4)]
    out.zero_()
    graph_nodes.set_touched(BOTH, frozenset())
    graphs[1].replay()
    graph_nodes.set_touched(BOTH, BOTH)
    for graph in graphs:
        graph.replay()
    assert out.tolist() == [1, 1, 1, 1]
    assert graph_nodes.report()["graphs"] == 4
    graphs[2].reset()
    del graphs[2]
    assert graph_nodes.report()["graphs"] == 3
    graph_nodes.set_touched(BOTH, frozenset())
    for graph in graphs:
        graph.replay()
    assert out.tolist() == [1, 1, 1, 1]
