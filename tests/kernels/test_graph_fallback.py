"""Graphs whose launches can't be left out, as a capture finds: everything is launched, where that is right."""

from typing import Any

import pytest
from tests.kernels.fake_cuda import (
    BOTH,
    FUNCTIONS,
    QKV,
    ROUTER,
    FakeGraph,
    FakeLibrary,
    captured,
    layer,
    one_module,
    replayed,
)  # fmt: skip

from lorahost_kernels.vllm_026 import graph_nodes
from lorahost_kernels.vllm_026.graph_driver import ADVICE, DriverError
from lorahost_kernels.vllm_026.graph_nodes import run_either, run_for

ONE = ["gemm", "router", "topk"]
NONE = frozenset[int]()


@pytest.fixture
def told(cuda: FakeLibrary) -> list[str]:
    """What an engine hears."""
    found: list[str] = []
    graph_nodes.state.tell = found.append
    return found


def fork(cuda: FakeLibrary, name: str) -> None:
    """Two launches side by side and one that waits for both."""
    before = cuda.last
    cuda.launch(f"{name} a")
    first = cuda.last
    cuda.last = before
    cuda.launch(f"{name} b")
    cuda.last = first + cuda.last
    cuda.launch(name)


@pytest.mark.parametrize("name", ["cuGraphClone", "cuGraphDestroyNode", "cuGraphInstantiateWithFlags"])
def test_a_graph_that_cannot_be_built(
    cuda: FakeLibrary, told: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    earlier = [captured(cuda, layer), captured(cuda, one_module)]
    graph_nodes.set_touched(BOTH, NONE)
    assert [replayed(graph) for graph in earlier] == [["gemm", "topk", "without", "sum"], ["gemm", "topk"]]
    with monkeypatch.context() as broken:
        broken.setattr(FakeLibrary, FUNCTIONS[name], lambda *_: 801)
        graph = captured(cuda, one_module)
    assert told == [f"{name} failed with CUDA error 801; {ADVICE}"]
    assert graph.instantiated == 1, "before there are requests"
    assert graph_nodes.state.driver is None, "so the modules that adapters touch are not followed any more"
    assert replayed(graph) == ONE
    assert replayed(earlier[0]) == ["gemm", "router shrink", "router expand", "topk", "qkv", "with", "sum"]
    assert replayed(earlier[1]) == ONE
    cuda.calls.clear()
    later = captured(cuda, layer)
    assert replayed(later) == ["gemm", "router shrink", "router expand", "topk", "qkv", "with", "sum"]
    assert (later.instantiated, cuda.calls, len(told)) == (1, [], 1)


def test_outside_graphs_everything_is_launched(
    cuda: FakeLibrary, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_nodes.set_touched(BOTH, NONE)
    assert run_for(QKV, lambda: 5) is None
    monkeypatch.setattr(FakeLibrary, FUNCTIONS["cuGraphClone"], lambda *_: 801)
    captured(cuda, one_module)
    assert run_for(QKV, lambda: 5) == 5


def test_a_fork(cuda: FakeLibrary, told: list[str]) -> None:
    def call(launch: Any) -> None:
        launch("gemm")
        run_for(ROUTER, lambda: launch("router"))
        assert run_for(QKV, lambda: fork(cuda, "qkv")) is None
        run_either(QKV, lambda: launch("with"), lambda: launch("without"))

    graph = captured(cuda, call)
    assert replayed(graph) == ["gemm", "router", "qkv a", "qkv b", "qkv", "with"]
    assert len(told) == 1
    assert "no chain in a CUDA graph: 2 nodes" in told[0]
    assert graph_nodes.state.recording is None


def test_a_stream_that_is_not_captured(cuda: FakeLibrary, told: list[str]) -> None:
    graph_nodes.state.recording = {}
    assert run_for(ROUTER, lambda: 5) == 5
    assert told == [f"the stream is not being captured (status 0); {ADVICE}"]


def test_a_fork_in_the_first_of_two_ways(cuda: FakeLibrary, told: list[str]) -> None:
    graph = captured(cuda, lambda launch: run_either(QKV, lambda: fork(cuda, "with"), lambda: launch("without")))
    assert replayed(graph) == ["with a", "with b", "with"]
    assert len(told) == 1


@pytest.mark.parametrize("where", ["second way", "behind both"])
def test_a_graph_with_both_ways_is_refused(cuda: FakeLibrary, told: list[str], where: str) -> None:
    """With all its launches it would give the untouched module's result."""
    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin()

    def call(launch: Any) -> None:
        if where == "second way":
            run_either(QKV, lambda: launch("with"), lambda: fork(cuda, "without"))
        run_either(QKV, lambda: launch("with"), lambda: launch("without"))
        run_for(ROUTER, lambda: fork(cuda, "router"))

    with pytest.raises(DriverError, match="LORAHOST_SKIP_UNTOUCHED=off"):
        call(cuda.launch)
    assert (told, graph_nodes.state.problem) == ([], "")


def test_a_graph_with_both_ways_that_cannot_be_built_is_refused(
    cuda: FakeLibrary, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLibrary, FUNCTIONS["cuGraphClone"], lambda *_: 801)
    with pytest.raises(DriverError, match=r"cuGraphClone failed with CUDA error 801; .*LORAHOST_SKIP_UNTOUCHED=off"):
        captured(cuda, layer)
    assert told == []


def test_a_copy_that_fails_before_a_replay(cuda: FakeLibrary, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(cuda, one_module)
    graph_nodes.set_touched(BOTH, NONE)
    monkeypatch.setattr(FakeLibrary, FUNCTIONS["cuGraphClone"], lambda *_: 2)
    assert [replayed(graph) for _ in range(2)] == [ONE, ONE]
    assert told == [f"cuGraphClone failed with CUDA error 2; {ADVICE}"]


def test_an_instance_that_cannot_be_freed(cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(cuda, layer)
    graph_nodes.set_touched(BOTH, NONE)
    assert replayed(graph) == ["gemm", "topk", "without", "sum"]
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    with monkeypatch.context() as broken:
        broken.setattr(FakeLibrary, FUNCTIONS["cuGraphExecDestroy"], lambda *_: 2)
        with pytest.raises(DriverError, match="cuGraphExecDestroy failed with CUDA error 2"):
            graph.replay()
    graph_nodes.set_touched(BOTH, NONE)
    assert replayed(graph) == ["gemm", "topk", "without", "sum"]


def test_the_reason_is_told_once(cuda: FakeLibrary, told: list[str]) -> None:
    for reason in ("first", "second"):
        with graph_nodes._or_launch_all([(QKV, True)]):
            raise DriverError(reason)
    assert told == [graph_nodes.state.problem] == ["first"]


def test_a_copy_with_both_ways_that_fails_before_a_replay_is_an_error(
    cuda: FakeLibrary, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = captured(cuda, layer)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    monkeypatch.setattr(FakeLibrary, FUNCTIONS["cuGraphClone"], lambda *_: 2)
    with pytest.raises(DriverError, match="cuGraphClone failed with CUDA error 2"):
        graph.replay()
    assert told == []
