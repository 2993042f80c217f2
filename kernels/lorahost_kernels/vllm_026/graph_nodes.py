"""Launches that are left out while no resident adapter needs them, in CUDA graphs, too.

A graph is captured before the adapters come, so it has the launches of every module. The nodes of such launches are
noted while a graph is captured, and switched off and on in the graph that is replayed (`cuGraphNodeSetEnabled`), which
costs less than kernels that end at once (`python -m bench.untouched`).

Launches may be chained by programmatic dependent launch, and what such an edge means behind a node that is off is not
in the driver's documentation: the next launch must wait for the end of the last one that is on. `check` tries it.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

CAPTURE_ACTIVE = 1
CHECKS = 40  # replays
MOST_NODES = 64  # of one module's launches


class DriverError(RuntimeError):
    """The CUDA driver has no such function, or it failed; the message says which."""


class GraphDriver(Protocol):
    """What is needed of CUDA graphs; nodes and graphs are the driver's handles."""

    def last_nodes(self, stream: int) -> list[int]:
        """Nodes that the next launch on a capturing stream will depend on."""
        ...

    def nodes_before(self, node: int) -> list[int]:
        """Nodes that a node depends on."""
        ...

    def switch(self, executable: int, node: int, on: bool) -> None:
        """Lets later replays of an instantiated graph run or leave out a node."""
        ...


class CudaDriver:
    """`GraphDriver` by libcuda; raises DriverError. The functions with edge data came with CUDA 12.3."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._capture_info = library.cuStreamGetCaptureInfo_v3
            self._dependencies = library.cuGraphNodeGetDependencies_v2
            self._set_enabled = library.cuGraphNodeSetEnabled
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from error

    def last_nodes(self, stream: int) -> list[int]:
        status, graph, edges = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        number, nodes, count = ctypes.c_uint64(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        _check(
            self._capture_info,
            ctypes.c_void_p(stream), *map(ctypes.byref, (status, number, graph, nodes, edges, count)),
        )  # fmt: skip
        if status.value != CAPTURE_ACTIVE:
            raise DriverError(f"the stream is not being captured (status {status.value})")
        return [int(nodes[i] or 0) for i in range(count.value)]

    def nodes_before(self, node: int) -> list[int]:
        # an edge's data are 8 bytes
        nodes, edges, count = (ctypes.c_void_p * MOST_NODES)(), (ctypes.c_uint64 * MOST_NODES)(), ctypes.c_size_t()
        count.value = MOST_NODES
        _check(self._dependencies, ctypes.c_void_p(node), nodes, edges, ctypes.byref(count))
        return [int(nodes[i] or 0) for i in range(count.value)]

    def switch(self, executable: int, node: int, on: bool) -> None:
        _check(self._set_enabled, ctypes.c_void_p(executable), ctypes.c_void_p(node), ctypes.c_uint(on))


def _check(function: Any, *args: Any) -> None:
    code = function(*args)
    if code:
        raise DriverError(f"{function.__name__} failed with CUDA error {code}")


Key = tuple[int, bool]


@dataclass
class State:
    """Of this process: modules that no adapter touches, and the nodes of the graph that is being captured.

    untouched: keys of modules; one that nothing was said about may be touched.
    recording: nodes by module, and whether they run where it is touched or where it is not.
    """

    driver: GraphDriver | None = None
    untouched: frozenset[int] = frozenset()
    recording: dict[Key, list[int]] | None = None


state = State()


def set_touched(modules: frozenset[int], touched: frozenset[int]) -> None:
    """Of `modules` the resident adapters have weights for those that are `touched`, from here on."""
    state.untouched = (state.untouched - modules) | (modules - touched)


def is_touched(module: int) -> bool:
    """Whether a resident adapter may have weights for the module."""
    return module not in state.untouched


def run_for(module: int, launch: Callable[[], T]) -> T | None:
    """What `launch` returns; None where no resident adapter touches the module, and nothing was launched.

    While a graph is captured it is always called, and replays leave its kernels out.

    Args:
        module: Key of a module, as in `set_touched`.
        launch: Launches kernels on the current stream that change nothing that other kernels read, unless an adapter
            touches the module.
    """
    if state.recording is not None:
        return _record((module, True), launch)
    return launch() if _needed(module) else None


def run_either(module: int, touched: Callable[[], object], untouched: Callable[[], object]) -> None:
    """Calls `touched` or, where no resident adapter touches the module, `untouched`, which gives the same for less.

    A captured graph has both, and replays run one of them.
    """
    if state.recording is not None:
        _record((module, True), touched)
        _record((module, False), untouched)
    elif _needed(module):
        touched()
    else:
        untouched()


def _needed(module: int) -> bool:
    """Whether a module's launches must be made now; a capture that nobody records must have all."""
    return state.driver is None or is_touched(module) or torch.cuda.is_current_stream_capturing()


def _record(key: Key, launch: Callable[[], T]) -> T:
    assert state.driver is not None
    assert state.recording is not None
    stream = torch.cuda.current_stream().cuda_stream
    before = state.driver.last_nodes(stream)
    result = launch()
    state.recording.setdefault(key, []).extend(nodes_since(state.driver, stream, before))
    return result


def nodes_since(driver: GraphDriver, stream: int, before: list[int]) -> list[int]:
    """Nodes that a capturing stream has got since its last ones were `before`. Raises DriverError for a fork."""
    nodes: list[int] = []
    last = driver.last_nodes(stream)
    while set(last) != set(before):
        if len(last) != 1 or len(nodes) == MOST_NODES:
            raise DriverError(
                f"a module's launches are no chain in a CUDA graph: {len(last)} nodes in one place after {len(nodes)}; "
                "without LORAHOST_SKIP_UNTOUCHED=on they are always launched"
            )
        nodes += last
        last = driver.nodes_before(last[0])
    return nodes


class Switches:
    """The noted nodes of one graph, and which of them are off."""

    def __init__(self, nodes: dict[Key, list[int]]) -> None:
        self._nodes = nodes
        self.forget()
        if nodes:
            _all.add(self)

    def forget(self) -> None:
        """The graph was instantiated again: everything is on."""
        self._off: set[Key] = set()
        self._seen: object = self

    def follow(self, executable: Callable[[], int]) -> None:
        """Switches what has changed since the last time; executable: gives the instantiated graph's handle."""
        if state.untouched is self._seen or state.driver is None:
            return
        for key, nodes in self._nodes.items():
            module, wanted = key
            off = is_touched(module) != wanted
            if off != (key in self._off):
                for node in nodes:
                    state.driver.switch(executable(), node, not off)
                (self._off.add if off else self._off.discard)(key)
        self._seen = state.untouched

    def counts(self) -> tuple[int, int]:
        """(noted nodes, those that are off)."""
        return sum(map(len, self._nodes.values())), sum(len(self._nodes[key]) for key in self._off)

    def rehearse(self, executable: Callable[[], int]) -> None:
        """Switches every node off and on, so that one that can't be is met before there are requests."""
        if state.driver is None:
            return
        for node in itertools.chain(*self._nodes.values()):
            for on in (False, True):
                state.driver.switch(executable(), node, on)


_all: weakref.WeakSet[Switches] = weakref.WeakSet()


def report() -> dict[str, int]:
    """How many graphs have noted nodes, how many nodes, and how many of them were off at their graph's last replay."""
    counts = [switches.counts() for switches in _all]
    return {"graphs": len(counts), "nodes": sum(c[0] for c in counts), "off": sum(c[1] for c in counts)}


def switched(base: Any) -> Any:
    """A subclass of `torch.cuda.CUDAGraph` whose replays leave out the launches of untouched modules."""

    class SwitchedGraph(base):
        """Keeps the captured graph, whose nodes name those of the instantiated one."""

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(keep_graph=True)
            self._switches = Switches({})

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            super().capture_begin(*args, **kwargs)
            state.recording = {}

        def capture_end(self) -> None:
            nodes, state.recording = state.recording, None
            super().capture_end()
            self._switches = Switches(nodes or {})
            self.instantiate()
            self._switches.rehearse(self.raw_cuda_graph_exec)

        def instantiate(self) -> None:
            super().instantiate()
            self._switches.forget()

        def replay(self) -> None:
            self._switches.follow(self.raw_cuda_graph_exec)
            super().replay()

    return SwitchedGraph


def start() -> str:
    """Makes every CUDA graph of this process from here on a switched one; "" or why that can't be.

    Not while memory comes from another pool than torch's own: it captures a graph.
    """
    if state.driver is not None:
        return ""
    try:
        driver = CudaDriver()
        graph = switched(torch.cuda.CUDAGraph)
        check(driver, graph)
    except Exception as error:  # whatever it is, launches for nothing are right, too
        return f"{type(error).__name__}: {error}"
    torch.cuda.CUDAGraph = graph  # type: ignore[misc]
    state.driver = driver
    return ""


def check(driver: GraphDriver, graph_class: Callable[[], Any]) -> None:
    """Raises DriverError unless a graph's nodes can be left out, and what follows them waits for what was before."""
    global state
    # needs Triton, which an engine on the CPU may lack
    from lorahost_kernels.vllm_026 import pdl_chain

    kept, stream = state, torch.cuda.current_stream()
    state = State(driver)
    try:
        for pdl in (False, True):
            chain = pdl_chain.Chain(lambda launch: run_for(1, launch), pdl)
            graph = graph_class()
            with torch.cuda.graph(graph):
                chain.launch()
            for turn in range(CHECKS):
                touched = turn % 4 == 3
                set_touched(frozenset({1}), frozenset({1} if touched else ()))
                if problem := chain.problem(graph.replay, touched):
                    raise DriverError(problem)
            # the next chain makes its first launches outside a graph
            set_touched(frozenset({1}), frozenset({1}))
    finally:
        torch.cuda.set_stream(stream)
        state = kept
