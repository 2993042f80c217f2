"""Whether launches can be left out of graphs here, which an engine's start finds out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.fake_cuda import FakeGraph, FakeLibrary

from lorahost_kernels.vllm_026 import graph_driver, graph_nodes, install, pdl_chain
from lorahost_kernels.vllm_026.graph_driver import DriverError
from lorahost_kernels.vllm_026.graph_nodes import State
from lorahost_kernels.vllm_026.patching import PluginError


class TestStart:
    """Without the driver's functions, or where they don't work, everything is launched, and the reason is known."""

    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph_nodes, "state", State())
        monkeypatch.setattr(install, "kernels", {})
        monkeypatch.setattr(install, "operations", {"shrink": "triton", "expand": "triton"})
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.delenv("LORAHOST_SKIP_UNTOUCHED", raising=False)

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

    @pytest.mark.parametrize("kind", [DriverError, RuntimeError])
    def test_driver_that_leaves_nothing_out(self, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
        def check(*_: Any) -> None:
            raise kind("counted [1, 2, 3]")

        monkeypatch.setattr(graph_nodes, "CudaDriver", SimpleNamespace)
        monkeypatch.setattr(graph_nodes, "check", check)
        install.skip_untouched()
        assert install.kernels["untouched_modules"]["fallback"] is True
        assert graph_nodes.state.driver is None

    @pytest.mark.parametrize("value", ["on", None])
    def test_launches_are_left_out_by_default(self, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
        if value:
            monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", value)
        monkeypatch.setattr(graph_nodes, "CudaDriver", SimpleNamespace)
        monkeypatch.setattr(graph_nodes, "check", lambda *_: None)
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["fallback"]) == ("skipped", False)
        assert isinstance(graph_nodes.state.driver, SimpleNamespace)
        assert issubclass(torch.cuda.CUDAGraph, FakeGraph)
        assert torch.cuda.CUDAGraph is not FakeGraph
        made = torch.cuda.CUDAGraph
        for value in ("on", "off"):
            monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", value)
            install.skip_untouched()
            assert torch.cuda.CUDAGraph is made, "a second engine has the same graphs"
            assert install.kernels["untouched_modules"]["path"] == "skipped"

    def test_what_turns_out_at_a_capture_is_said(
        self, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(graph_nodes, "CudaDriver", FakeLibrary)
        monkeypatch.setattr(graph_nodes, "check", lambda *_: None)
        install.skip_untouched()
        made = torch.cuda.CUDAGraph
        assert plugin_log.text.count("though for nothing") == 0
        with graph_nodes._or_launch_all([(1, True)]):
            raise DriverError("a fork")
        install.skip_untouched()
        assert torch.cuda.CUDAGraph is made, "a second engine gets the same answer"
        found = install.kernels["untouched_modules"]
        assert (found["path"], found["reason"], found["fallback"]) == ("launched", "a fork", True)
        assert plugin_log.text.count("launched, though for nothing: a fork") == 2

    def test_nothing_is_switched_without_our_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(install, "operations", {"shrink": "stock", "expand": "stock"})
        monkeypatch.setattr(graph_nodes, "start", lambda _: pytest.fail("was started"))
        install.skip_untouched()
        assert install.kernels == {}

    def test_off(self, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture) -> None:
        monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", "off")
        monkeypatch.setattr(graph_nodes, "start", lambda _: pytest.fail("was started"))
        install.skip_untouched()
        found = install.kernels["untouched_modules"]
        assert found == {"path": "launched", "reason": "LORAHOST_SKIP_UNTOUCHED=off", "fallback": False}
        assert torch.cuda.CUDAGraph is FakeGraph
        assert "though for nothing" not in plugin_log.text

    @pytest.mark.parametrize("value", [None, "off", "on"])
    def test_untried(self, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
        if value:
            monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", value)
        monkeypatch.setattr(graph_nodes, "start", lambda _: "")
        install.skip_untouched("several GPUs")
        found = install.kernels["untouched_modules"]
        reasons = {
            None: "not tried with several GPUs, LORAHOST_SKIP_UNTOUCHED=on leaves them out",
            "off": "LORAHOST_SKIP_UNTOUCHED=off",
            "on": "LORAHOST_SKIP_UNTOUCHED=on",
        }
        path = "skipped" if value == "on" else "launched"
        assert found == {"path": path, "reason": reasons[value], "fallback": False}

    def test_misspelt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORAHOST_SKIP_UNTOUCHED", "no")
        with pytest.raises(PluginError, match="LORAHOST_SKIP_UNTOUCHED='no' must be on or off"):
            install.skip_untouched()


class FakeChain:
    """`pdl_chain.Chain` on the counting driver; wrong: what is wrong with the replays of one kind of chain."""

    made: list["FakeChain"]
    cuda: FakeLibrary
    wrong: tuple[bool, bool, str]

    def __init__(self, optional: Callable[[Callable[[], object]], object], pdl: bool) -> None:
        self.optional, self.pdl = optional, pdl
        self.seen: set[bool] = set()
        self.made.append(self)

    def launch(self) -> None:
        self.cuda.launch("late")
        self.optional(lambda: self.cuda.launch("module", True))
        self.cuda.launch("reader", self.pdl)

    def problem(self, replay: Any, touched: bool) -> str:
        replay()
        assert self.cuda.order() == (["late", "module", "reader"] if touched else ["late", "reader"])
        self.seen.add(touched)
        return self.wrong[2] if (self.pdl, touched) == self.wrong[:2] else ""


class TestCheck:
    """Both kinds of readers, with the launches between and without them."""

    @pytest.fixture(autouse=True)
    def chains(self, cuda: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        @contextmanager
        def graph(of: Any) -> Iterator[None]:
            of.capture_begin()
            yield
            of.capture_end()

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(pdl_chain, "Chain", FakeChain)
        self.streams: list[Any] = []
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams.append)
        made: list[Any] = []
        for name, value in {"made": made, "cuda": cuda, "wrong": (False, False, "")}.items():
            monkeypatch.setattr(FakeChain, name, value, raising=False)
        return made

    def check(self) -> State:
        before, driver = graph_nodes.state, graph_nodes.state.driver
        assert driver is not None
        try:
            graph_nodes.check(driver, graph_nodes.following(FakeGraph))
        finally:
            assert graph_nodes.state is before
            assert [stream.cuda_stream for stream in self.streams] == [7]
        return before

    def test_every_kind_is_tried(self, chains: list[Any]) -> None:
        before = self.check()
        assert [chain.pdl for chain in chains] == [False, True]
        assert all(chain.seen == {False, True} for chain in chains)
        assert before.untouched == frozenset()

    @pytest.mark.parametrize("touched", [False, True])
    @pytest.mark.parametrize("pdl", [False, True])
    def test_what_is_wrong_is_said(
        self, chains: list[Any], monkeypatch: pytest.MonkeyPatch, pdl: bool, touched: bool
    ) -> None:
        monkeypatch.setattr(FakeChain, "wrong", (pdl, touched, "7 of 9 numbers"))
        with pytest.raises(DriverError, match="7 of 9 numbers"):
            self.check()
