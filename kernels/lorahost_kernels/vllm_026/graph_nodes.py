"""Launches that are left out while no resident adapter needs them, in CUDA graphs, too.

A graph is captured before the adapters come, so it has the launches of every module. The nodes of such launches are
noted while a graph is captured. Before a replay that may leave out others than the last one did, a copy of the graph
without them is instantiated, which replays launch then in place of PyTorch's.

Launches may be chained by programmatic dependent launch. What came behind a node that is left out waits for the end of
what came before it, by an edge of the usual kind; `check` tries it on the device.
Where a graph can't be followed, everything is launched from then on, unless it has both ways of `run_either`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lorahost_kernels.vllm_026.graph_driver import CudaDriver, DriverError, GraphDriver, advised, free_all, nodes_since

T = TypeVar("T")
Key = tuple[int, bool]
ONE, NONE = frozenset({1}), frozenset[int]()


@dataclass
class State:
    """Of this process: modules that no adapter touches, and the nodes of the graph that is being captured.

    untouched: keys of modules; one that nothing was said about may be touched.
    recording: nodes by module, and whether they run where it is touched or where it is not.
    tell: is given the reason when nothing is left out any more, the later `problem`; None: that is an error instead.
    """

    driver: GraphDriver | None = None
    untouched: frozenset[int] = frozenset()
    recording: dict[Key, list[int]] | None = None
    tell: Callable[[str], object] | None = None
    problem: str = ""


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
        if state.recording is not None:  # else the graph has the way that is always right
            _record((module, False), untouched)
    elif _needed(module):
        touched()
    else:
        untouched()


def _needed(module: int) -> bool:
    """Whether a module's launches must be made now; a capture that nobody records must have all."""
    return state.driver is None or is_touched(module) or torch.cuda.is_current_stream_capturing()


def _record(key: Key, launch: Callable[[], T]) -> T:
    driver, recording = state.driver, state.recording
    assert driver is not None
    assert recording is not None
    stream = torch.cuda.current_stream().cuda_stream
    # noted before its launches are in the graph: see _or_launch_all
    nodes = recording.setdefault(key, [])
    before: list[int] | None = None
    with _or_launch_all(recording), advised():
        before = driver.last_nodes(stream)
    result = launch()
    if before is not None:
        with _or_launch_all(recording), advised():
            nodes += nodes_since(driver, stream, before)
    return result


@contextmanager
def _or_launch_all(recorded: Iterable[Key]) -> Iterator[None]:
    try:
        yield
    except DriverError as error:
        if not _launch_all(str(error), recorded):
            raise


def _launch_all(problem: str, recorded: Iterable[Key]) -> bool:
    """Leaves out nothing from here on, tells why; False where a graph of which that is recorded would be wrong so."""
    if state.tell is None or any(not touched for _, touched in recorded):
        return False
    state.driver, state.recording, state.untouched = None, None, frozenset()
    if not state.problem:
        state.problem = problem
        state.tell(problem)
    return True


class Launches:
    """The noted nodes of one captured graph, and the instance without some of them that is launched in its place.

    Args:
        graph: The captured graph, which stays as it is as long as this lives.
        nodes: Its noted nodes.

    Raises:
        DriverError: The graph can't be copied, or nodes can't be taken out of it.
    """

    def __init__(self, graph: int, nodes: dict[Key, list[int]]) -> None:
        self._graph, self.nodes, self._driver = graph, nodes, state.driver
        self._out: frozenset[Key] = frozenset()
        self._seen = object()
        self._instance: list[int] = []  # one at most; where there is none, PyTorch's has all launches
        # whether there is one of PyTorch's, since nothing was left out at the end of the capture
        self._pytorch: bool | None = None
        self.builds, self.seconds = 0, 0.0
        if not nodes or self._driver is None:
            return
        # at the end of the process the driver may be gone
        weakref.finalize(self, free_all, self._driver, self._instance).atexit = False
        with advised():
            # one that can't be built is met before there are requests
            self._driver.release(self._without(self._driver, frozenset(nodes)))
        _all.add(self)

    def ready(self) -> bool:
        """Makes an instance if other launches are to be left out than it lacks; whether there is one.

        Raises:
            DriverError: It can't be made; the next call tries again.
        """
        if self._driver is None or state.untouched is self._seen:
            return bool(self._instance)
        untouched, began = state.untouched, time.perf_counter()
        out = frozenset(key for key in self.nodes if is_touched(key[0]) != key[1])
        self._pytorch = not out if self._pytorch is None else self._pytorch
        if out != self._out:
            with advised():
                new = [] if self._pytorch and not out else [self._without(self._driver, out)]
            # at once: where the old one can't be freed they must fit each other
            old, self._instance[:], self._out = [*self._instance], new, out
            free_all(self._driver, old)
            self.builds, self.seconds = self.builds + 1, self.seconds + time.perf_counter() - began
        self._seen = untouched
        return bool(self._instance)

    def launch(self) -> None:
        """Launches the instance on the current stream.

        Random numbers of the graph would be the same at each launch, and a model has none.
        """
        assert self._driver is not None
        self._driver.launch(self._instance[0], torch.cuda.current_stream().cuda_stream)

    def _without(self, driver: GraphDriver, out: frozenset[Key]) -> int:
        copy = driver.copy(self._graph)
        try:
            driver.remove(copy, [driver.twin(node, copy) for key in out for node in self.nodes[key]])
            return driver.instantiate(copy)
        finally:
            driver.destroy(copy)

    def counts(self) -> tuple[int, int]:
        """(noted nodes, those that are left out)."""
        return sum(map(len, self.nodes.values())), sum(len(self.nodes[key]) for key in self._out)


_all: weakref.WeakSet[Launches] = weakref.WeakSet()


def report() -> dict[str, int]:
    """Of all graphs with noted nodes.

    graphs, nodes: how many; out: nodes that were left out at their graph's last replay; builds, build_ms: how often
    an instance was made, at the end of a capture or before a replay, and how long that took.
    """
    counts = [launches.counts() for launches in _all]
    return {
        "graphs": len(counts),
        "nodes": sum(c[0] for c in counts),
        "out": sum(c[1] for c in counts),
        "builds": sum(launches.builds for launches in _all),
        "build_ms": round(1000 * sum(launches.seconds for launches in _all)),
    }


def following(base: Any) -> Any:
    """A subclass of `torch.cuda.CUDAGraph` whose replays leave out the launches of untouched modules."""

    class FollowingGraph(base):
        """Keeps the captured graph, to copy it."""

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(keep_graph=True)
            self._launches = Launches(0, {})

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            super().capture_begin(*args, **kwargs)
            state.recording = None if state.driver is None else {}

        def capture_end(self) -> None:
            nodes, state.recording = state.recording or {}, None
            super().capture_end()
            self._launches, ready = Launches(0, {}), False
            with _or_launch_all(nodes):
                launches = Launches(self.raw_cuda_graph(), nodes)
                ready, self._launches = launches.ready(), launches
            if not ready:
                self.instantiate()

        def reset(self) -> None:
            super().reset()
            self._launches = Launches(0, {})

        def replay(self) -> None:
            try:
                ready = self._launches.ready()
            except DriverError as error:
                if not _launch_all(str(error), self._launches.nodes):
                    raise
                self._launches, ready = Launches(0, {}), False
            if ready:
                self._launches.launch()
            else:
                super().replay()

    return FollowingGraph


def start(tell: Callable[[str], object] | None = None) -> str:
    """Makes every CUDA graph of this process from here on a following one; "" or why that can't be.

    It captures a graph, so not while memory comes from another pool than torch's own.
    Args:
        tell: Is given the reason if that turns out later; without it that capture or replay fails.
    """
    if state.driver is not None or state.problem:
        return state.problem
    try:
        driver = CudaDriver()
        graph = following(torch.cuda.CUDAGraph)
        check(driver, graph)
    except Exception as error:  # whatever it is, launches for nothing are right, too
        return f"{type(error).__name__}: {error}"
    torch.cuda.CUDAGraph = graph  # type: ignore[misc]
    state.driver, state.tell = driver, tell
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
            if problem := pdl_chain.problem_of(chain, graph_class(), lambda on: set_touched(ONE, ONE if on else NONE)):
                raise DriverError(problem)
    finally:
        torch.cuda.set_stream(stream)
        state = kept
