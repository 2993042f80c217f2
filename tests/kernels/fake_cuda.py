"""The driver's and PyTorch's CUDA graphs on a stream that only counts: what `graph_driver` and `graph_nodes` call."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from lorahost_kernels.vllm_026 import graph_driver
from lorahost_kernels.vllm_026.graph_driver import CudaDriver

OK, INVALID = 0, 1
FUNCTIONS = {
    "cuStreamGetCaptureInfo_v3": "_capture_info",
    "cuGraphNodeGetDependencies_v2": "_before",
    "cuGraphNodeGetDependentNodes_v2": "_behind",
    "cuGraphAddDependencies_v2": "_add_edges",
    "cuGraphClone": "_clone",
    "cuGraphNodeFindInClone": "_find",
    "cuGraphGetNodes": "_get_nodes",
    "cuGraphDestroyNode": "_destroy_node",
    "cuGraphAddChildGraphNode": "_add_graph",
    "cuGraphDestroy": "_destroy_graph",
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
        self._numbers = itertools.count(1)
        self.capturing: int | None = None
        self._last: list[int] = []
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
        self._last = []
        return self.capturing

    def end(self) -> None:
        self.capturing = None

    def launch(self, name: str, early: bool = False) -> None:
        assert self.capturing is not None
        node = next(self._numbers)
        self.graphs[self.capturing][node] = Node(name, dict.fromkeys(self._last, early))
        self._last = [node]

    def order(self, graph: int) -> list[str]:
        """Names in an order in which the graph may run."""
        nodes, done, names = dict(self.graphs[graph]), set(), []
        while nodes:
            ready = [n for n, node in nodes.items() if node.before.keys() <= done]
            assert ready, "an edge to a node that is gone, or a circle"
            for number in ready:
                done.add(number)
                names.append(nodes.pop(number).name)
        return names

    def edges(self, graph: int) -> set[tuple[str, str, bool]]:
        """(name before, name behind, may start early)."""
        nodes = self.graphs[graph]
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
            graph.value, count.value = self.capturing, len(self._last)
            self._kept = (ctypes.c_void_p * len(self._last))(*self._last)
            ctypes.pointer(nodes)[0] = ctypes.cast(self._kept, ctypes.POINTER(ctypes.c_void_p))
        return OK

    def _neighbours(self, found: list[int], out: Any, edges: Any, count: Any) -> int:
        if out is not None:
            assert len(out) == len(edges) == count._obj.value
            for i, node in enumerate(found):
                out[i] = node
        count._obj.value = len(found)
        return OK

    def _before(self, node: Any, out: Any, edges: Any, count: Any) -> int:
        return self._neighbours(list(self._graph_of(_handle(node))[_handle(node)].before), out, edges, count)

    def _behind(self, node: Any, out: Any, edges: Any, count: Any) -> int:
        of = _handle(node)
        return self._neighbours([n for n, o in self._graph_of(of).items() if of in o.before], out, edges, count)

    def _add_edges(self, graph: Any, before: Any, behind: Any, data: None, count: Any) -> int:
        assert data is None, "edges of the usual kind"
        nodes = self.graphs[_handle(graph)]
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

    def _get_nodes(self, graph: Any, out: Any, count: Any) -> int:
        return self._neighbours(list(self.graphs[_handle(graph)]), out, out, count)

    def _destroy_node(self, node: Any) -> int:
        nodes = self._graph_of(_handle(node))
        del nodes[_handle(node)]
        for other in nodes.values():
            other.before.pop(_handle(node), None)
        return OK

    def _add_graph(self, out: Any, graph: Any, before: None, count: Any, child: Any) -> int:
        nodes = self.graphs[_handle(graph)]
        assert not nodes
        assert count.value == 0
        # a child's nodes run as if they were the graph's own
        nodes.update(self._copied(self.graphs[_handle(child)]))
        out._obj.value = next(self._numbers)
        return OK

    def _destroy_graph(self, graph: Any) -> int:
        del self.graphs[_handle(graph)]
        return OK


class FakeGraph:
    """What is used of torch.cuda.CUDAGraph, on `library`."""

    library: FakeLibrary | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph, "the captured graph would be gone"
        self.runs: list[list[str]] = []
        self.instantiated = 0

    def capture_begin(self) -> None:
        assert self.library is not None
        self._graph = self.library.begin()

    def capture_end(self) -> None:
        assert self.library is not None
        self.library.end()

    def raw_cuda_graph(self) -> int:
        return self._graph

    def instantiate(self) -> None:
        self.instantiated += 1
        assert self.library is not None
        self._order = self.library.order(self._graph)

    def replay(self) -> None:
        self.runs.append(self._order)


def driver_of(library: FakeLibrary, monkeypatch: Any) -> CudaDriver:
    """A driver whose libcuda is `library`."""
    monkeypatch.setattr(graph_driver.ctypes, "CDLL", lambda _: library)
    return CudaDriver()
