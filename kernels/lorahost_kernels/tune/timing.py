"""Time of device work by CUDA graph replay, and the error of a result against float64."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorahost_kernels.configs import cdiv

Call = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Microseconds: median, 20th and 80th percentile."""

    p50: float
    p20: float
    p80: float


def capture(calls: Sequence[Call], warm: int | None = None) -> torch.cuda.CUDAGraph:
    """A graph of all calls in turn; the first `warm` of them (default: all) run once before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:warm]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each of `replays` replays, sorted."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks))


def spread(times: Sequence[float], calls: int) -> Spread:
    """Median, 20th and 80th percentile of sorted times, per call."""
    each = [t / calls for t in times]
    return Spread(each[len(each) // 2], each[len(each) // 5], each[len(each) * 4 // 5])


def graph_us(calls: Sequence[Call], replays: int = 30) -> Spread:
    """Microseconds per call of a graph of all `calls` in turn; give each its own inputs, beyond the L2 in sum."""
    graph = capture(calls)
    for _ in range(3):
        graph.replay()
    times = replay_us(graph, replays)
    graph.reset()
    return spread(times, len(calls))


def quick_us(calls: Sequence[Call], good: float = float("inf"), seconds: float = 0.008) -> float:
    """Median microseconds per call, about `seconds` of replays.

    A graph that takes over 1.15 times `good` in its first replays is not measured further.
    """
    graph = capture(calls, warm=1)
    graph.replay()
    first = replay_us(graph, 3)
    times = first
    if first[0] / len(calls) < 1.15 * good:
        times = replay_us(graph, max(5, min(40, int(seconds * 1e6 / first[0]))))
    graph.reset()
    return spread(times, len(calls)).p50


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def calls_for(wanted: int, weights: int, activations: int, copies: int) -> int:
    """Calls that touch `wanted` bytes together; each has weights of its own, `copies` have activations of their own."""
    calls = cdiv(wanted, weights + activations)
    return calls if calls <= copies else cdiv(wanted - copies * activations, weights)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN stays NaN."""
    wide = reference.to(torch.float64)
    return float(torch.linalg.vector_norm(out.to(torch.float64) - wide) / torch.linalg.vector_norm(wide))
