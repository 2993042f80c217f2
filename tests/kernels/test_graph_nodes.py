"""Launches that replays leave out: the bookkeeping, on a driver and a graph that only count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorahost_kernels.vllm_026 import graph_nodes, install
from lorahost_kernels.vllm_026.graph_nodes import DriverError, State, run_either, run_for
from lorahost_kernels.vllm_026.patching import PluginError

ROUTER, QKV = 11, 12
BOTH = frozenset({ROUTER, QKV})


class FakeDriver:
    """A stream whose launches become a chain of nodes, and which of them are off."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.off: set[int] = set()
        self.switched: list[tuple[str, bool]] = []

    def launch(self, name: str) -> None:
        self.names.append(name)

    def last_nodes(self, stream: int) -> list[int]:
        return [len(self.names)] if self.names else []

    def nodes_before(self, node: int) -> list[int]:
        return [node - 1] if node > 1 else []

    def switch(self, executable: int, node: int, on: bool) -> None:
        assert executable == 99
        self.switched.append((self.names[node - 1], on))
        (self.off.discard if on else self.off.add)(node)

    def ran(self) -> list[str]:
        return [name for node, name in enumerate(self.names, 1) if node not in self.off]


class FakeGraph:
    """What is used of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph, "the nodes' handles are lost with the graph"

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def instantiate(self) -> None:
        graph_nodes.state.driver.off.clear()  # type: ignore[union-attr]

    def replay(self) -> None: ...

    def raw_cuda_graph_exec(self) -> int:
        return 99


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(graph_nodes, "state", State(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def layer(driver: FakeDriver) -> None:
    """Base product, a router's and qkv's LoRA launches, and experts that have two ways."""
    driver.launch("gemm")
    run_for(ROUTER, lambda: [driver.launch("router shrink"), driver.launch("router expand")])
    driver.launch("topk")
    run_for(QKV, lambda: driver.launch("qkv"))
    run_either(QKV, lambda: driver.launch("with"), lambda: driver.launch("without"))


def captured(driver: FakeDriver) -> Any:
    graph = graph_nodes.switched(FakeGraph)()
    graph.capture_begin()
    layer(driver)
    graph.capture_end()
    return graph


ALL = ["gemm", "router shrink", "router expand", "topk", "qkv", "with"]


def test_replays_leave_out_what_no_adapter_touches(driver: FakeDriver) -> None:
    graph = captured(driver)
    assert driver.names == [*ALL, "without"]
    assert driver.off == set()
    graph.replay()
    assert driver.ran() == ALL, "before any adapter has come, each module may be touched"
    for touched, want in (
        ({QKV}, ["gemm", "topk", "qkv", "with"]),
        (set(), ["gemm", "topk", "without"]),
        ({ROUTER}, ["gemm", "router shrink", "router expand", "topk", "without"]),
        ({ROUTER, QKV}, ALL),
    ):
        graph_nodes.set_touched(BOTH, frozenset(touched))
        graph.replay()
        assert driver.ran() == want
        assert graph_nodes.report()["off"] == len(driver.off)


def test_only_what_changes_is_switched(driver: FakeDriver) -> None:
    graph = captured(driver)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    graph.replay()
    driver.switched.clear()
    graph.replay()
    graph_nodes.set_touched(BOTH | {77}, frozenset({QKV, 77}))
    graph.replay()
    assert driver.switched == []
    graph_nodes.set_touched(BOTH, BOTH)
    graph.replay()
    assert sorted(driver.switched) == [("router expand", True), ("router shrink", True)]


def test_a_graph_that_is_instantiated_again_is_switched_again(driver: FakeDriver) -> None:
    graph = captured(driver)
    graph_nodes.set_touched(BOTH, frozenset({QKV}))
    graph.replay()
    graph.instantiate()
    assert "router expand" in driver.ran()
    graph.replay()
    assert "router expand" not in driver.ran()


def test_a_graph_without_such_launches_is_left_alone(driver: FakeDriver) -> None:
    graph = graph_nodes.switched(FakeGraph)()
    graph.capture_begin()
    driver.launch("gemm")
    graph.capture_end()
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    assert driver.switched == []


def test_modules_of_another_engine_keep_what_is_known_of_them(driver: FakeDriver) -> None:
    graph_nodes.set_touched(frozenset({ROUTER}), frozenset({ROUTER}))
    graph_nodes.set_touched(frozenset({QKV}), frozenset())
    assert (graph_nodes.is_touched(ROUTER), graph_nodes.is_touched(QKV)) == (True, False)
    assert graph_nodes.is_touched(99), "nobody has said that no adapter touches it"


def test_every_node_is_tried_at_the_end_of_a_capture(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(executable: int, node: int, on: bool) -> None:
        raise DriverError("cuGraphNodeSetEnabled failed with CUDA error 801")

    monkeypatch.setattr(driver, "switch", refuses)
    with pytest.raises(DriverError, match="801"):
        captured(driver)
    assert graph_nodes.state.recording is None


def test_outside_graphs_nothing_is_launched_for_an_untouched_module(driver: FakeDriver) -> None:
    layer(driver)
    assert driver.names == ALL
    driver.names.clear()
    graph_nodes.set_touched(BOTH, frozenset({ROUTER}))
    layer(driver)
    assert driver.names == ["gemm", "router shrink", "router expand", "topk", "without"]
    assert run_for(QKV, lambda: 5) is None
    assert run_for(ROUTER, lambda: 5) == 5


def test_a_capture_that_nobody_records_has_every_launch(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_nodes.set_touched(BOTH, frozenset())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer(driver)
    assert driver.names == ALL


def test_everything_is_launched_where_the_driver_cannot_switch(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_nodes, "state", State(None, BOTH))
    layer(driver)
    assert driver.names == ALL


def test_first_node_of_a_graph(driver: FakeDriver) -> None:
    graph = graph_nodes.switched(FakeGraph)()
    graph.capture_begin()
    run_for(ROUTER, lambda: driver.launch("router"))
    graph.capture_end()
    graph_nodes.set_touched(BOTH, frozenset())
    graph.replay()
    assert driver.ran() == []


def test_a_fork_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_nodes.switched(FakeGraph)()
    graph.capture_begin()
    driver.launch("gemm")
    monkeypatch.setattr(driver, "nodes_before", lambda node: [node - 1, node - 2] if node > 2 else [])
    with pytest.raises(DriverError, match=r"no chain in a CUDA graph: 2 nodes .* LORAHOST_SKIP_UNTOUCHED=on"):
        run_for(QKV, lambda: [driver.launch(name) for name in "abc"])
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

        monkeypatch.setattr(graph_nodes.ctypes, "CDLL", missing)
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["fallback"]) == ("launched", True)
        assert "libcuda.so.1: cannot open" in found["reason"]
        assert "libcuda.so.1: cannot open" in plugin_log.text
        assert graph_nodes.state.driver is None

    def test_old_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_nodes.ctypes, "CDLL", lambda _: SimpleNamespace())
        install.skip_untouched()
        assert "cuStreamGetCaptureInfo_v3" in install.kernels["untouched_modules"]["reason"]

    def test_driver_that_does_not_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def check(*_: Any) -> None:
            raise DriverError("counted [1, 2, 3]")

        monkeypatch.setattr(graph_nodes, "CudaDriver", FakeDriver)
        monkeypatch.setattr(graph_nodes, "check", check)
        install.skip_untouched()
        assert install.kernels["untouched_modules"]["fallback"] is True
        assert graph_nodes.state.driver is None

    def test_working_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_nodes, "CudaDriver", FakeDriver)
        monkeypatch.setattr(graph_nodes, "check", lambda *_: None)
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["fallback"]) == ("skipped", False)
        assert isinstance(graph_nodes.state.driver, FakeDriver)
        assert issubclass(torch.cuda.CUDAGraph, FakeGraph)
        made = torch.cuda.CUDAGraph
        install.skip_untouched()
        assert torch.cuda.CUDAGraph is made, "a second engine switches the same graphs"

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
