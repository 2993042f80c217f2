"""Launches that replays leave out: the bookkeeping and the graphs, on a driver that only counts."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.fake_cuda import FUNCTIONS, FakeGraph, FakeLibrary, driver_of

from lorahost_kernels.vllm_026 import graph_driver, graph_nodes, install
from lorahost_kernels.vllm_026.graph_driver import DriverError
from lorahost_kernels.vllm_026.graph_nodes import State, run_either, run_for
from lorahost_kernels.vllm_026.patching import PluginError

ROUTER, QKV = 11, 12
BOTH = frozenset({ROUTER, QKV})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    found = FakeLibrary()
    monkeypatch.setattr(FakeGraph, "library", found)
    with pytest.MonkeyPatch.context() as loading:
        monkeypatch.setattr(graph_nodes, "state", State(driver_of(found, loading)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def layer(launch: Any) -> None:
    """Base product, a router's and qkv's LoRA launches, and experts that have two ways."""
    launch("gemm")
    run_for(ROUTER, lambda: [launch("router shrink", True), launch("router expand", True)])
    launch("topk")
    run_for(QKV, lambda: launch("qkv", True))
    run_either(QKV, lambda: launch("with", True), lambda: launch("without", True))
    launch("sum")


def captured(cuda: FakeLibrary, call: Any = layer) -> Any:
    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin()
    call(cuda.launch)
    graph.capture_end()
    return graph


def replayed(graph: Any) -> list[str]:
    graph.replay()
    return list(graph.runs[-1])


ALL = ["gemm", "router shrink", "router expand", "topk", "qkv", "with", "sum"]


def test_replays_leave_out_what_no_adapter_touches(cuda: FakeLibrary) -> None:
    graph = captured(cuda)
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


def test_what_follows_waits_for_the_end_of_what_was_before(cuda: FakeLibrary) -> None:
    """An edge by which a launch may start early, before its inputs are written, is no edge to another launch."""
    graph = captured(cuda)
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    found = cuda.edges(graph.raw_cuda_graph())
    assert found == {("gemm", "topk", False), ("topk", "without", False), ("without", "sum", False)}
    graph_nodes.set_touched(BOTH, frozenset({ROUTER}))
    graph.replay()
    found = cuda.edges(graph.raw_cuda_graph())
    assert found == {
        ("gemm", "router shrink", True),  # as captured
        ("router shrink", "router expand", True),
        ("router expand", "topk", False),
        ("topk", "without", False),
        ("without", "sum", False),
    }


def test_launches_of_another_stream_are_waited_for_once(cuda: FakeLibrary) -> None:
    def call(launch: Any) -> None:
        launch("gemm")
        run_for(ROUTER, lambda: launch("router", True))
        # a join: what comes next waits for the product itself, too
        nodes = cuda.graphs[cuda.capturing or 0]
        gemm = min(nodes)
        launch("topk")
        nodes[max(nodes)].before[gemm] = False

    graph = captured(cuda, call)
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == ["gemm", "topk"]
    assert cuda.edges(graph.raw_cuda_graph()) == {("gemm", "topk", False)}


def test_a_graph_is_built_only_for_what_changes_in_it(cuda: FakeLibrary) -> None:
    graph = captured(cuda)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    graph.replay()
    before = graph.instantiated
    cuda.calls.clear()
    graph.replay()
    graph_nodes.set_touched(BOTH | {77}, frozenset({QKV, 77}))
    graph.replay()
    assert (graph.instantiated, cuda.calls) == (before, [])
    graph_nodes.set_touched(BOTH, BOTH)
    graph.replay()
    assert graph.instantiated == before + 1


def test_a_graph_without_such_launches_is_left_alone(cuda: FakeLibrary) -> None:
    graph = captured(cuda, lambda launch: launch("gemm"))
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == ["gemm"]
    assert "cuGraphClone" not in cuda.calls


def test_copies_are_freed(cuda: FakeLibrary) -> None:
    graph = captured(cuda)
    for touched in (BOTH, frozenset(), BOTH, frozenset({QKV})):
        graph_nodes.set_touched(BOTH, touched)
        graph.replay()
    assert len(cuda.graphs) == 2, "the graph, and what was captured"
    del graph
    gc.collect()
    assert len(cuda.graphs) == 1, "PyTorch's own"
    assert graph_nodes.report()["graphs"] == 0


def test_a_build_that_failed_is_not_taken_for_done(cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(cuda)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    with monkeypatch.context() as broken:
        broken.setattr(graph, "instantiate", lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                graph.replay()
    assert replayed(graph) == ["gemm", "topk", "qkv", "with", "sum"]


def test_modules_of_another_engine_keep_what_is_known_of_them(cuda: FakeLibrary) -> None:
    graph_nodes.set_touched(frozenset({ROUTER}), frozenset({ROUTER}))
    graph_nodes.set_touched(frozenset({QKV}), frozenset())
    assert (graph_nodes.is_touched(ROUTER), graph_nodes.is_touched(QKV)) == (True, False)
    assert graph_nodes.is_touched(99), "nobody has said that no adapter touches it"


@pytest.mark.parametrize("name", ["cuGraphClone", "cuGraphDestroyNode", "cuGraphAddDependencies_v2"])
def test_a_graph_that_cannot_be_built_is_met_at_the_end_of_its_capture(
    cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(FakeLibrary, FUNCTIONS[name], lambda *_: 801)
    graph_nodes.state.driver = driver_of(cuda, monkeypatch)
    with pytest.raises(DriverError, match=f"{name} failed with CUDA error 801"):
        captured(cuda)
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


def test_first_and_last_node_of_a_graph(cuda: FakeLibrary) -> None:
    def call(launch: Any) -> None:
        run_for(ROUTER, lambda: launch("router"))

    graph = captured(cuda, call)
    assert replayed(graph) == ["router"]
    graph_nodes.set_touched(BOTH, frozenset())
    assert replayed(graph) == []


def test_a_fork_is_refused(cuda: FakeLibrary) -> None:
    def fork() -> None:
        nodes = cuda.graphs[cuda.capturing or 0]
        for name in "abc":
            cuda.launch(name)
        nodes[max(nodes)].before = dict.fromkeys(sorted(nodes)[1:3], False)

    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin()
    cuda.launch("gemm")
    with pytest.raises(DriverError, match=r"no chain in a CUDA graph: 2 nodes .* LORAHOST_SKIP_UNTOUCHED=on"):
        run_for(QKV, fork)
    graph.capture_end()
    assert graph_nodes.state.recording is None


class TestStart:
    """Without the driver's functions, or where they don't work, everything is launched, and the reason is known."""

    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_nodes, "state", State())
        monkeypatch.setattr(install, "kernels", {})
        monkeypatch.setattr(install, "operations", {"shrink": "triton", "expand": "triton"})
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", "on")

    def test_missing_library(self, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture) -> None:
        def missing(name: str) -> None:
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(graph_driver.ctypes, "CDLL", missing)
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["fallback"]) == ("launched", True)
        assert "libcuda.so.1: cannot open" in found["reason"]
        assert "libcuda.so.1: cannot open" in plugin_log.text
        assert graph_nodes.state.driver is None

    def test_old_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_driver.ctypes, "CDLL", lambda _: SimpleNamespace())
        install.skip_untouched()
        assert "cuStreamGetCaptureInfo_v3" in install.kernels["untouched_modules"]["reason"]

    def test_driver_that_leaves_nothing_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def check(*_: Any) -> None:
            raise DriverError("counted [1, 2, 3]")

        monkeypatch.setattr(graph_nodes, "CudaDriver", SimpleNamespace)
        monkeypatch.setattr(graph_nodes, "check", check)
        install.skip_untouched()
        assert install.kernels["untouched_modules"]["fallback"] is True
        assert graph_nodes.state.driver is None

    def test_working_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_nodes, "CudaDriver", SimpleNamespace)
        monkeypatch.setattr(graph_nodes, "check", lambda *_: None)
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["fallback"]) == ("skipped", False)
        assert isinstance(graph_nodes.state.driver, SimpleNamespace)
        assert issubclass(torch.cuda.CUDAGraph, FakeGraph)
        made = torch.cuda.CUDAGraph
        install.skip_untouched()
        assert torch.cuda.CUDAGraph is made, "a second engine has the same graphs"

    def test_nothing_is_switched_without_our_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(install, "operations", {"shrink": "stock", "expand": "stock"})
        monkeypatch.setattr(graph_nodes, "start", lambda: pytest.fail("was started"))
        install.skip_untouched()
        assert install.kernels == {}

    @pytest.mark.parametrize("value", ["off", None])
    def test_off_is_the_default(self, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
        monkeypatch.delenv("LORAHOST_SKIP_UNTOUCHED")
        if value:
            monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", value)
        monkeypatch.setattr(graph_nodes, "start", lambda: pytest.fail("was started"))
        install.skip_untouched()
        assert install.kernels == {}

    def test_misspelt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", "no")
        with pytest.raises(PluginError, match="LORAHOST_SKIP_UNTOUCHED='no' must be on or off"):
            install.skip_untouched()
