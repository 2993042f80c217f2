"""Graphs that are built anew: what waits for what, and what can't be built."""

from typing import Any

import pytest
from tests.kernels.fake_cuda import (
    BOTH,
    QKV,
    ROUTER,
    STREAM,
    FakeGraph,
    FakeLibrary,
    Node,
    captured,
    layer,
    replayed,
)  # fmt: skip

from lorahost_kernels.vllm_026 import graph_driver, graph_nodes
from lorahost_kernels.vllm_026.graph_driver import DriverError
from lorahost_kernels.vllm_026.graph_nodes import run_for


def test_what_follows_waits_for_the_end_of_what_was_before(cuda: FakeLibrary) -> None:
    """An edge by which a launch may start early, before its inputs are written, is no edge to another launch."""
    graph = captured(cuda, layer)
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    found = cuda.edges()
    assert found == {("gemm", "topk", False), ("topk", "without", False), ("without", "sum", False)}
    graph_nodes.set_touched(BOTH, frozenset({ROUTER}))
    graph.replay()
    found = cuda.edges()
    assert found == {
        ("gemm", "router shrink", True),  # as captured
        ("router shrink", "router expand", True),
        ("router expand", "topk", False),
        ("topk", "without", False),
        ("without", "sum", False),
    }


def test_a_gap_between_two_streams(cuda: FakeLibrary) -> None:
    def call(launch: Any) -> None:
        launch("x")
        x = cuda.last
        launch("base")
        base = cuda.last
        cuda.last = x
        launch("tail")
        cuda.last = x + cuda.last
        run_for(ROUTER, lambda: [launch("shrink"), launch("expand", True)])
        expand = cuda.last
        launch("other")
        other = cuda.last
        cuda.last = base + expand
        launch("join")
        cuda.last = other + cuda.last
        launch("end")

    graph = captured(cuda, call)
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    found = cuda.edges()
    assert {b for b, n, _ in found if n == "join"} == {"x", "tail", "base"}
    assert {b for b, n, _ in found if n == "other"} == {"x", "tail"}


@pytest.mark.parametrize("early", [False, True])
def test_a_second_edge_over_a_gap(cuda: FakeLibrary, early: bool) -> None:
    """One by which the launch behind waits for the end is enough; one by which it may start early is not."""

    def call(launch: Any) -> None:
        launch("gemm")
        [gemm] = cuda.last
        run_for(ROUTER, lambda: launch("router", True))
        launch("topk")
        cuda.graphs[cuda.capturing or 0][cuda.last[0]].before[gemm] = early

    if early:
        with pytest.raises(DriverError, match="must wait for by another way"):
            captured(cuda, call)
        return
    graph = captured(cuda, call)
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == ["gemm", "topk"]
    assert cuda.edges() == {("gemm", "topk", False)}


@pytest.mark.parametrize("early", [True, False])
def test_a_copy_with_edges_of_another_kind_is_refused(
    cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    driver = graph_nodes.state.driver
    assert driver is not None
    graph = cuda.begin()
    for launch, soon in (("gemm", False), ("topk", False), ("router", True)):
        cuda.launch(launch, soon)
    copied = FakeLibrary._copied

    def of_one_kind(library: FakeLibrary, nodes: dict[int, Node]) -> dict[int, Node]:
        found = copied(library, nodes)
        for node in found.values():
            node.before = dict.fromkeys(node.before, early)
        return found

    driver.copy(graph)
    monkeypatch.setattr(FakeLibrary, "_copied", of_one_kind)
    with pytest.raises(DriverError, match="edges of other kinds"):
        driver.copy(graph)


def test_a_stream_that_is_not_captured(cuda: FakeLibrary) -> None:
    graph_nodes.state.recording = {}
    with pytest.raises(DriverError, match=r"not being captured \(status 0\)"):
        run_for(ROUTER, lambda: None)


def test_too_many_launches(cuda: FakeLibrary) -> None:
    def call(launch: Any) -> None:
        launch("gemm")
        run_for(ROUTER, lambda: [launch("again") for _ in range(graph_driver.MOST_NODES + 1)])

    with pytest.raises(DriverError, match="after 64"):
        captured(cuda, call)


def test_first_and_last_node_of_a_graph(cuda: FakeLibrary) -> None:
    def call(launch: Any) -> None:
        run_for(ROUTER, lambda: launch("router"))

    graph = captured(cuda, call)
    assert replayed(graph) == ["router"]
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == []
    graph_nodes.set_touched(BOTH, BOTH)
    assert replayed(graph) == ["router"]


def test_a_graph_without_edges_or_nodes(cuda: FakeLibrary) -> None:
    """The driver refuses an array for nothing, and there is no edge in a graph of one node."""
    driver = graph_nodes.state.driver
    assert driver is not None
    for names in (["gemm"], []):
        graph = captured(cuda, lambda launch, names=names: [launch(name) for name in names])
        driver.launch(driver.instantiate(driver.copy(graph._graph)), STREAM)
        assert cuda.order() == names


def test_a_fork_is_refused(cuda: FakeLibrary) -> None:
    def fork() -> None:
        nodes = cuda.graphs[cuda.capturing or 0]
        for name in "abc":
            cuda.launch(name)
        nodes[max(nodes)].before = dict.fromkeys(sorted(nodes)[1:3], False)

    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin()
    cuda.launch("gemm")
    with pytest.raises(DriverError, match=r"no chain in a CUDA graph: 2 nodes .* LORAHOST_SKIP_UNTOUCHED=off"):
        run_for(QKV, fork)
    graph.capture_end()
    assert graph_nodes.state.recording is None
