"""The driver's and PyTorch's CUDA graphs on a stream that only counts: what `graph_driver` and `graph_nodes` call."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from lorahost_kernels.vllm_026 import graph_driver, graph_nodes
from lorahost_kernels.vllm_026.graph_driver import CudaDriver
from lorahost_kernels.vllm_026.graph_nodes import run_either, run_for

ROUTER, QKV = 11, 12
BOTH = frozenset({ROUTER, QKV})
OK, INVALID = 0, 1
STREAM = 7
EARLY = 0x010001  # data of an edge behind which a launch may start early
FUNCTIONS = {
    "cuStreamGetCaptureInfo_v3": "_capture_info",
    "cuGraphNodeGetDependencies_v2": "_before",
    "cuGraphNodeGetDependentNodes_v2": "_behind",
    "cuGraphAddDependencies_v2": "_add_edges",
    "cuGraphClone": "_clone",
    "cuGraphNodeFindInClone": "_find",
    "cuGraphGetEdges_v2": "_get_edges",
    "cuGraphDestroyNode": "_destroy_node",
    "cuGraphDestroy": "_destroy_graph",
    "cuGraphInstantiateWithFlags": "_instantiate",
    "cuGraphLaunch": "_launch_graph",
    "cuGraphExecDestroy": "_release",
}


class Node:
    """A launch. `before`: handles of the nodes that it waits for, and whether it may start before they have ended."""

    def __init__(self, name: str, before: dict[int, bool], origin: int = 0) -> None:
        self.name, self.before, self.origin = name, before, origin


def _handle(value: Any) -> int:
    return int(value.value or 0)


class FakeLibrary:
    """libcuda's functions for graphs, with its argument types, and `launch` for what a capture notes."""

    def __init__(self) -> None:
        self.graphs: dict[int, dict[int, Node]] = {}
        self.instances: dict[int, dict[int, Node]] = {}
        self.ran: list[dict[int, Node]] = []
        self._numbers = itertools.count(1 << 40)  # more than 32 bits, as addresses have
        self.capturing: int | None = None
        self.last: list[int] = []
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)

        def function(*args: Any) -> int:
            self.calls.append(name)
            return int(getattr(self, FUNCTIONS[name])(*args))

        function.__name__ = name
        return function

    def begin(self) -> int:
        self.capturing = self._new({})
        self.last = []
        return self.capturing

    def end(self) -> None:
        self.capturing = None

    def launch(self, name: str, early: bool = False) -> None:
        assert self.capturing is not None
        node = next(self._numbers)
        self.graphs[self.capturing][node] = Node(name, dict.fromkeys(self.last, early))
        self.last = [node]

    def order(self, graph: int | None = None) -> list[str]:
        """Names in an order in which a graph may run; None: the last launch's."""
        nodes, done, names = dict(self.ran[-1] if graph is None else self.graphs[graph]), set[int](), list[str]()
        while nodes:
            ready = [n for n, node in nodes.items() if node.before.keys() <= done]
            assert ready, "an edge to a node that is gone, or a circle"
            for number in ready:
                done.add(number)
                names.append(nodes.pop(number).name)
        return names

    def edges(self) -> set[tuple[str, str, bool]]:
        """Of the last launch: (name before, name behind, may start early)."""
        nodes = self.ran[-1]
        return {(nodes[b].name, node.name, early) for node in nodes.values() for b, early in node.before.items()}

    def _new(self, nodes: dict[int, Node]) -> int:
        graph = next(self._numbers)
        self.graphs[graph] = nodes
        return graph

    def _graph_of(self, node: int) -> dict[int, Node]:
        [found] = [nodes for nodes in self.graphs.values() if node in nodes]
        return found

    def _capture_info(self, stream: Any, *out: Any) -> int:
        status, _, graph, nodes, _, count = (o._obj for o in out)
        status.value = int(self.capturing is not None)
        if self.capturing is not None:
            graph.value, count.value = self.capturing, len(self.last)
            self._kept = (ctypes.c_void_p * len(self.last))(*self.last)
            ctypes.pointer(nodes)[0] = ctypes.cast(self._kept, ctypes.POINTER(ctypes.c_void_p))
        return OK

    def _give(self, found: dict[int, bool], out: Any, edges: Any, count: Any) -> int:
        if out is not None:
            if not found:
                return INVALID  # the driver takes no array for nothing
            assert len(out) == count._obj.value
            assert ctypes.sizeof(out) == 8 * len(out)
            assert edges is None or ctypes.sizeof(edges) == 8 * len(out), "an edge's data are 8 bytes"
            for i, (node, early) in enumerate(found.items()):
                out[i] = node
                if edges is not None:
                    edges[i] = EARLY * early
        count._obj.value = len(found)
        return OK

    def _before(self, node: Any, out: Any, edges: Any, count: Any) -> int:
        return self._give(self._graph_of(_handle(node))[_handle(node)].before, out, edges, count)

    def _behind(self, node: Any, out: Any, edges: Any, count: Any) -> int:
        of = _handle(node)
        found = {n: o.before[of] for n, o in self._graph_of(of).items() if of in o.before}
        return self._give(found, out, edges, count)

    def _get_edges(self, graph: Any, before: Any, behind: Any, edges: Any, count: Any) -> int:
        nodes = self.graphs[_handle(graph)]
        found = [(b, n, early) for n, node in nodes.items() for b, early in node.before.items()]
        count._obj.value = len(found)
        if before is not None:
            if not found:
                return INVALID
            assert ctypes.sizeof(before) == ctypes.sizeof(behind) == ctypes.sizeof(edges) == 8 * len(found)
            for i, (b, n, early) in enumerate(found):
                before[i], behind[i], edges[i] = b, n, EARLY * early
        return OK

    def _add_edges(self, graph: Any, before: Any, behind: Any, data: None, count: Any) -> int:
        assert data is None, "edges of the usual kind"
        nodes = self.graphs[_handle(graph)]
        if not count.value:
            return INVALID
        for i in range(count.value):
            if before[i] not in nodes or behind[i] not in nodes or before[i] in nodes[behind[i]].before:
                return INVALID
            nodes[behind[i]].before[before[i]] = False
        return OK

    def _copied(self, nodes: dict[int, Node]) -> dict[int, Node]:
        new = {number: next(self._numbers) for number in nodes}
        return {
            new[number]: Node(node.name, {new[b]: early for b, early in node.before.items()}, number)
            for number, node in nodes.items()
        }

    def _clone(self, out: Any, graph: Any) -> int:
        out._obj.value = self._new(self._copied(self.graphs[_handle(graph)]))
        return OK

    def _find(self, out: Any, node: Any, graph: Any) -> int:
        found = [n for n, o in self.graphs[_handle(graph)].items() if o.origin == _handle(node)]
        out._obj.value = found[0] if found else 0
        return OK if found else INVALID

    def _destroy_node(self, node: Any) -> int:
        nodes = self._graph_of(_handle(node))
        del nodes[_handle(node)]
        for other in nodes.values():
            other.before.pop(_handle(node), None)
        return OK

    def _destroy_graph(self, graph: Any) -> int:
        del self.graphs[_handle(graph)]
        return OK

    def _instantiate(self, out: Any, graph: Any, flags: Any) -> int:
        assert flags.value == 9, "as PyTorch instantiates its own"
        assert self.capturing is None
        out._obj.value = next(self._numbers)
        self.instances[out._obj.value] = self._copied(self.graphs[_handle(graph)])
        return OK

    def _launch_graph(self, instance: Any, stream: Any) -> int:
        assert stream.value == STREAM
        self.ran.append(self.instances[_handle(instance)])
        return OK

    def _release(self, instance: Any) -> int:
        del self.instances[_handle(instance)]
        return OK


class FakeGraph:
    """What is used of torch.cuda.CUDAGraph, on `library`."""

    library: FakeLibrary

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph, "the captured graph would be gone"
        self.instantiated = 0
        self.pool: object = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.pool = pool
        self._graph = self.library.begin()

    def capture_end(self) -> None:
        self.library.end()

    def raw_cuda_graph(self) -> int:
        return self._graph

    def instantiate(self) -> None:
        self.instantiated += 1

    def replay(self) -> None:
        # as PyTorch does for a graph that it keeps
        self.instantiated = self.instantiated or 1
        self.library.ran.append(dict(self.library.graphs[self._graph]))

    def reset(self) -> None:
        self.instantiated = 0


def layer(launch: Any) -> None:
    """Base product, a router's and qkv's LoRA launches, and experts that have two ways."""
    launch("gemm")
    run_for(ROUTER, lambda: [launch("router shrink", True), launch("router expand", True)])
    launch("topk")
    run_for(QKV, lambda: launch("qkv", True))
    run_either(QKV, lambda: launch("with", True), lambda: launch("without", True))
    launch("sum")


def one_module(launch: Any) -> None:
    """A module that has one way, between base products."""
    launch("gemm")
    run_for(ROUTER, lambda: launch("router", True))
    launch("topk")


def captured(library: FakeLibrary, call: Callable[[Callable[..., None]], object]) -> Any:
    """A graph of what `call` launches by the function that it is given."""
    graph = graph_nodes.following(FakeGraph)()
    graph.capture_begin()
    call(library.launch)
    graph.capture_end()
    return graph


def replayed(graph: Any) -> list[str]:
    """Names of the launches of one replay."""
    graph.replay()
    return list(graph.library.order())


def driver_of(library: FakeLibrary, monkeypatch: Any) -> CudaDriver:
    """A driver whose libcuda is `library`."""
    monkeypatch.setattr(graph_driver.ctypes, "CDLL", lambda _: library)
    return CudaDriver()
