"""The tuner's timing, for the benchmarks."""

from lorahost_kernels.tune.timing import Spread, graph_us, relative_error

__all__ = ["Spread", "graph_us", "relative_error"]
