"""Launches that replays leave out: which, and what of it is told."""

import gc
from typing import Any

import pytest
import torch
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
from lorahost_kernels.vllm_026.graph_driver import DriverError
from lorahost_kernels.vllm_026.graph_nodes import State, run_for

ALL = ["gemm", "router shrink", "router expand", "topk", "qkv", "with", "sum"]


def test_replays_leave_out_what_no_adapter_touches(cuda: FakeLibrary) -> None:
    graph = captured(cuda, layer)
    assert replayed(graph) == ALL, "before any adapter has come, each module may be touched"
    for touched, want in (
        ({QKV}, ["gemm", "topk", "qkv", "with", "sum"]),
        (set(), ["gemm", "topk", "without", "sum"]),
        ({ROUTER}, ["gemm", "router shrink", "router expand", "topk", "without", "sum"]),
        ({ROUTER, QKV}, ALL),
    ):
        graph_nodes.set_touched(BOTH, frozenset(touched))
        assert replayed(graph) == want
        assert graph_nodes.report()["out"] == len(ALL) + 1 - len(want)


def test_a_graph_is_built_only_for_what_changes_in_it(cuda: FakeLibrary) -> None:
    graph = captured(cuda, layer)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    graph.replay()
    cuda.calls.clear()
    graph.replay()
    graph_nodes.set_touched(BOTH | {77}, frozenset({QKV, 77}))
    graph.replay()
    assert cuda.calls == ["cuGraphLaunch"] * 2
    graph_nodes.set_touched(BOTH, BOTH)
    graph.replay()
    assert cuda.calls.count("cuGraphInstantiateWithFlags") == 1


def test_pytorch_launches_a_graph_that_lacks_nothing(cuda: FakeLibrary) -> None:
    graph = captured(cuda, one_module)
    assert (graph.instantiated, cuda.instances) == (1, {}), "before there are requests"
    for touched, instances, names in (
        (frozenset[int](), 1, ["gemm", "topk"]),
        (BOTH, 0, ["gemm", "router", "topk"]),
    ):
        graph_nodes.set_touched(BOTH, touched)
        assert replayed(graph) == names
        assert len(cuda.instances) == instances


def test_a_graph_is_instantiated_by_one_side(cuda: FakeLibrary) -> None:
    """Where one was made at the end of the capture, no second one is made of the whole graph within a request."""
    graph_nodes.set_touched(BOTH, frozenset())
    graph = captured(cuda, one_module)
    assert (graph.instantiated, len(cuda.instances)) == (0, 1)
    graph_nodes.set_touched(BOTH, BOTH)
    assert replayed(graph) == ["gemm", "router", "topk"]
    assert (graph.instantiated, len(cuda.instances)) == (0, 1)


def test_a_graph_without_such_launches_is_left_alone(cuda: FakeLibrary) -> None:
    graph = captured(cuda, lambda launch: launch("gemm"))
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == ["gemm"]
    assert "cuGraphClone" not in cuda.calls


def test_copies_are_freed(cuda: FakeLibrary) -> None:
    graph, other = captured(cuda, layer), captured(cuda, layer)
    for touched in (BOTH, frozenset(), BOTH, frozenset({QKV})):
        for one in (graph, other):
            graph_nodes.set_touched(BOTH, touched)
            one.replay()
    assert (len(cuda.graphs), len(cuda.instances)) == (2, 2), "PyTorch's graphs, and what each launches"
    assert graph_nodes.report()["graphs"] == 2
    other.reset()
    del graph
    gc.collect()
    assert (len(cuda.graphs), len(cuda.instances)) == (2, 0)
    assert graph_nodes.report()["graphs"] == 0


@pytest.mark.parametrize("name", ["cuGraphClone", "cuGraphDestroyNode", "cuGraphInstantiateWithFlags"])
def test_a_graph_that_lacks_what_is_needed_is_never_replayed(
    cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where it can't be built with a module that an adapter touches now, the request fails; a later one tries again."""
    graph = captured(cuda, layer)
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    with monkeypatch.context() as broken:
        broken.setattr(FakeLibrary, FUNCTIONS[name], lambda *_: 2)
        for _ in range(2):
            with pytest.raises(DriverError, match=f"{name} failed with CUDA error 2; with LORAHOST_SKIP_UNTOUCHED=off"):
                graph.replay()
    assert len(cuda.ran) == 1
    assert replayed(graph) == ["gemm", "topk", "qkv", "with", "sum"]
    assert (len(cuda.graphs), len(cuda.instances)) == (1, 1), "nothing is left of what failed"


def test_the_report_counts_builds(cuda: FakeLibrary) -> None:
    graph = captured(cuda, layer)
    before = graph_nodes.report()
    assert (before["graphs"], before["nodes"], before["out"]) == (1, 5, 1)
    for touched in (BOTH, frozenset(), frozenset(), BOTH):
        graph_nodes.set_touched(BOTH, touched)
        graph.replay()
    graph._launches.seconds = 0.0034
    after = graph_nodes.report()
    assert (after["builds"] - before["builds"], after["build_ms"]) == (2, 3)


def test_modules_of_another_engine_keep_what_is_known_of_them(cuda: FakeLibrary) -> None:
    graph_nodes.set_touched(frozenset({ROUTER}), frozenset({ROUTER}))
    graph_nodes.set_touched(frozenset({QKV}), frozenset())
    assert (graph_nodes.is_touched(ROUTER), graph_nodes.is_touched(QKV)) == (True, False)
    assert graph_nodes.is_touched(99), "nobody has said that no adapter touches it"


@pytest.mark.parametrize("call", [layer, one_module], ids=["two ways", "one way"])
@pytest.mark.parametrize("name", ["cuGraphClone", "cuGraphDestroyNode", "cuGraphAddDependencies_v2"])
def test_a_graph_that_cannot_be_built_is_met_at_the_end_of_its_capture(
    cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch, name: str, call: Any
) -> None:
    monkeypatch.setattr(FakeLibrary, FUNCTIONS[name], lambda *_: 801)
    with pytest.raises(DriverError, match=f"{name} failed with CUDA error 801; with LORAHOST_SKIP_UNTOUCHED=off"):
        captured(cuda, call)
    assert graph_nodes.state.recording is None


def test_a_capture_takes_what_pytorch_gives_it(cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin(pool="pool")
    layer(cuda.launch)
    graph.capture_end()
    assert graph.pool == "pool"
    assert (graph.instantiated, len(cuda.instances)) == (0, 1), "built before there are requests"
    assert replayed(graph) == ALL
    monkeypatch.setattr(cuda, "end", lambda: (_ for _ in ()).throw(RuntimeError("capture failed")))
    with pytest.raises(RuntimeError, match="capture failed"):
        captured(cuda, layer)
    assert graph_nodes.state.recording is None


def test_outside_graphs_nothing_is_launched_for_an_untouched_module(cuda: FakeLibrary) -> None:
    names: list[str] = []

    def launch(name: str, early: bool = False) -> None:
        names.append(name)

    layer(launch)
    assert names == ALL
    names.clear()
    graph_nodes.set_touched(BOTH, frozenset({ROUTER}))
    layer(launch)
    assert names == ["gemm", "router shrink", "router expand", "topk", "without", "sum"]
    assert run_for(QKV, lambda: 5) is None
    assert run_for(ROUTER, lambda: 5) == 5


@pytest.mark.parametrize("recorder", [True, False])
def test_a_capture_that_nobody_records_has_every_launch(
    cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch, recorder: bool
) -> None:
    names: list[str] = []
    graph_nodes.set_touched(BOTH, frozenset())
    if not recorder:
        monkeypatch.setattr(graph_nodes, "state", State(None, BOTH))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder)
    layer(lambda name, early=False: names.append(name))
    assert names == ALL
