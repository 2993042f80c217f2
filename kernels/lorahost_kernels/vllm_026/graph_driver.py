"""The CUDA driver's functions for captured graphs, called by ctypes: PyTorch has none that edits a graph."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

CAPTURE_ACTIVE = 1
# PyTorch's: memory of a graph is freed at its next launch, and its nodes have the priorities of their streams
FLAGS = 1 | 8
MOST_NODES = 64  # of one module's launches
ADVICE = "with LORAHOST_SKIP_UNTOUCHED=off launches are never left out of a CUDA graph"

Array = Any  # of ctypes


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

    def copy(self, graph: int) -> int:
        """A graph of its own with the same nodes and edges, until `destroy`."""
        ...

    def twin(self, node: int, copy: int) -> int:
        """The node of a copy that stands for one of the graph it was made from."""
        ...

    def remove(self, graph: int, nodes: Iterable[int]) -> None:
        """Takes nodes out of a graph: what came behind one of them waits for the end of what came before it."""
        ...

    def destroy(self, graph: int) -> None:
        """Frees a copy."""
        ...

    def instantiate(self, graph: int) -> int:
        """What of a graph can be launched, until `release`; the graph may be destroyed before."""
        ...

    def launch(self, instance: int, stream: int) -> None:
        """Launches an instantiated graph."""
        ...

    def release(self, instance: int) -> None:
        """Frees an instantiated graph, at the end of its launches that are under way."""
        ...


@contextmanager
def advised() -> Iterator[None]:
    """Gives an error the name of the setting without which there are no such graphs."""
    try:
        yield
    except Exception as error:
        raise DriverError(f"{error}; {ADVICE}") from error


def nodes_since(driver: GraphDriver, stream: int, before: list[int]) -> list[int]:
    """Nodes that a capturing stream has got since its last ones were `before`. Raises DriverError for a fork."""
    nodes: list[int] = []
    last = driver.last_nodes(stream)
    while set(last) != set(before):
        if len(last) != 1 or len(nodes) == MOST_NODES:
            raise DriverError(
                f"a module's launches are no chain in a CUDA graph: {len(last)} nodes in one place after {len(nodes)}"
            )
        nodes += last
        last = driver.nodes_before(last[0])
    return nodes


def free_all(driver: GraphDriver, instances: list[int]) -> None:
    """Frees instances and empties the list."""
    while instances:
        driver.release(instances.pop())


class CudaDriver:
    """`GraphDriver` by libcuda; raises DriverError. The functions with edge data came with CUDA 12.3.

    A function that lists things refuses an array for none of them, so each is asked for their number first.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._capture_info = library.cuStreamGetCaptureInfo_v3
            self._before = library.cuGraphNodeGetDependencies_v2
            self._behind = library.cuGraphNodeGetDependentNodes_v2
            self._add_edges = library.cuGraphAddDependencies_v2
            self._clone, self._find = library.cuGraphClone, library.cuGraphNodeFindInClone
            self._edges = library.cuGraphGetEdges_v2
            self._destroy_node, self._destroy_graph = library.cuGraphDestroyNode, library.cuGraphDestroy
            self._instantiate, self._launch = library.cuGraphInstantiateWithFlags, library.cuGraphLaunch
            self._release = library.cuGraphExecDestroy
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
        return _handles(nodes, count.value)

    def nodes_before(self, node: int) -> list[int]:
        return list(self._neighbours(self._before, node))

    def copy(self, graph: int) -> int:
        found = ctypes.c_void_p()
        _check(self._clone, ctypes.byref(found), ctypes.c_void_p(graph))
        self._compare_edges(graph, int(found.value or 0))
        return int(found.value or 0)

    def twin(self, node: int, copy: int) -> int:
        found = ctypes.c_void_p()
        _check(self._find, ctypes.byref(found), ctypes.c_void_p(node), ctypes.c_void_p(copy))
        return int(found.value or 0)

    def remove(self, graph: int, nodes: Iterable[int]) -> None:
        for node in nodes:
            before = self.nodes_before(node)
            for behind in self._neighbours(self._behind, node):
                has = self._neighbours(self._before, behind)
                if any(has.get(b) for b in before):
                    raise DriverError("a launch may start before one has ended that it must wait for by another way")
                if not (new := [b for b in before if b not in has]):
                    continue
                # no edge data: each edge waits for the end of a node, as behind launches that may not start early
                _check(
                    self._add_edges,
                    ctypes.c_void_p(graph), _array(new), _array([behind] * len(new)), None, ctypes.c_size_t(len(new)),
                )  # fmt: skip
            _check(self._destroy_node, ctypes.c_void_p(node))

    def destroy(self, graph: int) -> None:
        _check(self._destroy_graph, ctypes.c_void_p(graph))

    def instantiate(self, graph: int) -> int:
        found = ctypes.c_void_p()
        _check(self._instantiate, ctypes.byref(found), ctypes.c_void_p(graph), ctypes.c_uint64(FLAGS))
        return int(found.value or 0)

    def launch(self, instance: int, stream: int) -> None:
        _check(self._launch, ctypes.c_void_p(instance), ctypes.c_void_p(stream))

    def release(self, instance: int) -> None:
        _check(self._release, ctypes.c_void_p(instance))

    def _neighbours(self, function: Callable[..., int], node: int) -> dict[int, int]:
        """Nodes by their handles, and the data of the edge to each: 0 where it waits for the end."""
        count = ctypes.c_size_t()
        _check(function, ctypes.c_void_p(node), None, None, ctypes.byref(count))
        if not count.value:
            return {}
        nodes, edges = _room(count), _room(count, ctypes.c_uint64)
        _check(function, ctypes.c_void_p(node), nodes, edges, ctypes.byref(count))
        return dict(zip(_handles(nodes, count.value), edges, strict=True))

    def _compare_edges(self, graph: int, copy: int) -> None:
        # what copies keep of an edge's data is not in the driver's documentation
        kinds, copied = self._edge_kinds(graph), self._edge_kinds(copy)
        if kinds != copied:
            raise DriverError(f"a copied graph has edges of other kinds: {dict(copied)} instead of {dict(kinds)}")

    def _edge_kinds(self, graph: int) -> Counter[int]:
        count = ctypes.c_size_t()
        _check(self._edges, ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
        if not count.value:
            return Counter()
        before, behind, data = _room(count), _room(count), _room(count, ctypes.c_uint64)
        _check(self._edges, ctypes.c_void_p(graph), before, behind, data, ctypes.byref(count))
        return Counter(data)


def _room(count: ctypes.c_size_t, kind: Any = ctypes.c_void_p) -> Array:
    # an edge's data are 8 bytes
    return (kind * count.value)()


def _handles(nodes: Array, count: int) -> list[int]:
    return [int(nodes[i] or 0) for i in range(count)]


def _array(nodes: list[int]) -> Array:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _check(function: Any, *args: Any) -> None:
    code = function(*args)
    if code:
        raise DriverError(f"{function.__name__} failed with CUDA error {code}")
