"""Time of device work by CUDA graph replay, and the error of a result against float64."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """Microseconds: median, 20th and 80th percentile."""

    p50: float
    p20: float
    p80: float


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 30) -> Spread:
    """Microseconds per call of a graph of all `calls` in turn; give each its own inputs, beyond the L2 in sum."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 / len(calls) for a, b in itertools.pairwise(marks))
    graph.reset()
    return Spread(times[len(times) // 2], times[len(times) // 5], times[len(times) * 4 // 5])


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN stays NaN."""
    wide = reference.to(torch.float64)
    return float(torch.linalg.vector_norm(out.to(torch.float64) - wide) / torch.linalg.vector_norm(wide))
