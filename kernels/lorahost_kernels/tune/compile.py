"""Compiles candidates in worker processes: Triton's cache on disk then has what the measuring process launches."""

import concurrent.futures
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from lorahost_kernels.configs import ExpandConfig, Mode, ShrinkConfig, max_tiles
from lorahost_kernels.ops.common import launch, replay
from lorahost_kernels.ops.common.routing import Routing, WorkList, slice_columns, unweighted
from lorahost_kernels.ops.expand_swiglu import launch as swiglu_launch
from lorahost_kernels.ops.expand_topk_sum import launch as topk_sum_launch
from lorahost_kernels.tune import fused
from lorahost_kernels.tune.plan import Place, operations
from lorahost_kernels.tuned.shape import ModelShape, Module, MoeShape

Pair = tuple[ShrinkConfig, ExpandConfig]
ROUND_SECONDS = 60.0  # for all candidates of a round; what is not ready by then isn't worth more
TOO_SLOW = "not compiled in time"
BROKEN = "the workers died"
MOST_JOBS = 28


@dataclass(frozen=True)
class Problem:
    """One product's sizes at one batch size; moe and half ("gate_up", "down") or module, never both."""

    moe: MoeShape | None
    half: str
    module: Module | None
    slots: int
    rank: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    fused: bool = False  # whether the expand takes over the step behind it

    def operations(self, mode: Mode) -> tuple[str, str]:
        """Names of its shrink and its expand."""
        return operations("moe_fused" if self.fused else "moe" if self.moe else "dense", self.half, mode)

    @property
    def pairs(self) -> int:
        """Rows of the batch, one for each (token, top-k entry)."""
        return self.tokens * (self.moe.topk if self.moe else 1)

    @property
    def groups(self) -> int:
        """(slot, expert) pairs."""
        return self.slots * (self.moe.experts if self.moe else 1)

    @property
    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """(columns in, columns out of each slice)."""
        if self.module:
            return self.module.k, self.module.outs
        assert self.moe is not None
        if self.half == "gate_up":
            return self.moe.hidden, (self.moe.gate_up_width,) * self.moe.slices
        return self.moe.intermediate, (self.moe.hidden,)


def problems(shape: ModelShape, place: Place, dtype: torch.dtype = torch.bfloat16) -> dict[str, Problem]:
    """The products of a point's family."""
    common = (place.adapters, place.rank, place.tokens)
    if place.family != "dense":
        kind = (dtype, place.family == "moe_fused")
        return {half: Problem(shape.moe, half, None, *common, *kind) for half in ("gate_up", "down")}
    return {name: Problem(None, "", m, *common, dtype) for name, m in shape.modules.items()}


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def routing_without_memory(p: Problem, block_m: int | None) -> Routing:
    """The batch's routing, tensors without memory."""
    index: dict[str, Any] = {"dtype": torch.int32}
    work = None
    if block_m is not None:
        tiles = max_tiles(p.pairs, p.groups, block_m)
        work = WorkList(meta(p.pairs, **index), meta(1 + 3 * tiles, **index), tiles, block_m)
    topk = p.moe.topk if p.moe else 1
    return Routing(
        meta(p.tokens, **index),
        meta(p.slots + 1, **index),
        p.moe.experts if p.moe else 1,
        meta(p.tokens, topk, **index) if p.moe else None,
        meta(p.tokens, topk, dtype=torch.float32) if p.moe else None,
        meta(p.pairs, **index) if p.fused else None,
        work=work,
    )


def warm_up(kernel: Any, key: Any, pointers: tuple[Tensor, ...], constants: Callable[[], replay.Constants]) -> None:
    """Stands in for `replay.launch`: compiles instead of launching."""
    programs, args, options, specialize = constants()
    kernel = replay.specialized(kernel) if specialize else kernel
    kernel.warmup(*pointers, grid=(programs,), **args, **options)


def compile_pair(p: Problem, pair: Pair) -> None:
    """Compiles the launches of one candidate, in a process made for it; raises what Triton raises."""
    shrink, expand = pair
    routing = routing_without_memory(p, shrink.block_m if shrink.mode == "list" else None)
    k, outs = p.sizes
    experts = p.moe.experts if p.moe else 1
    a = [meta(p.slots, experts, p.rank, k, dtype=p.dtype) for _ in outs]
    b = [meta(p.slots, experts, n, p.rank, dtype=p.dtype) for n in outs]
    down = p.half == "down" and p.moe is not None
    x = meta(p.pairs if down else p.tokens, k, dtype=p.dtype)
    lead = (p.tokens, p.moe.topk) if p.moe else (p.tokens,)
    y = meta(*lead, sum(outs), dtype=p.dtype)
    first, second = p.operations(shrink.mode)
    h = launch.run_shrink(kernel_of(first), first, x, a, routing, down, shrink)
    if p.fused:
        compile_fused(second, y, h, b, routing, expand)
        return
    routing = routing if down else unweighted(routing)
    launch.run_expand(kernel_of(second), second, y, h, b, routing, slice_columns(b), True, expand)


def compile_fused(
    operation: str, y: Tensor, h: Tensor, b: list[Tensor], routing: Routing, config: ExpandConfig
) -> None:
    """Compiles the expand of experts whose rows are in the order of their experts."""
    if operation == "expand_swiglu":
        rows = y.flatten(0, 1)
        fused.gate_up_expand(meta(rows.shape[0], rows.shape[1] // 2, dtype=y.dtype), rows, h, b, routing, config)
    else:
        # with a work list the sum behind the expand is torch's
        fused.down_last(meta(y.shape[0], y.shape[2], dtype=y.dtype), y, h, b, routing, config)


def kernel_of(operation: str) -> Any:
    """The Triton kernel of an operation."""
    return getattr(importlib.import_module(f"lorahost_kernels.ops.{operation}.kernel"), f"{operation}_kernel")


class CompileOnly(DriverBase):  # type: ignore[misc]
    """Triton's view of a GPU of a given compute capability (90: sm_90) that this process never touches."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        """See DriverBase."""
        return True

    def get_current_target(self) -> GPUTarget:
        """See DriverBase."""
        return self.target

    def get_current_device(self) -> int:
        """Key of Triton's caches in this process."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Needed by launches only."""
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        """Needed by launches only."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Needed by launches only."""
        raise NotImplementedError


def start_worker(capability: int) -> None:
    """Makes this process one that compiles, without a CUDA context; tensors without memory have no device to ask."""
    torch.set_num_threads(1)
    driver.set_active(CompileOnly(capability))
    for module in (launch, swiglu_launch, topk_sum_launch):
        module.has_pdl = lambda device: capability >= 90  # type: ignore[attr-defined]
    replay.launch = warm_up


def ready() -> None:
    """Work that only starts a worker."""


def attempt(p: Problem, pair: Pair) -> str:
    """Compiles in a worker; what went wrong, or nothing."""
    try:
        compile_pair(p, pair)
    except Exception as failure:  # the candidate is out, whatever the compiler says about it
        return f"{type(failure).__name__}: {failure}"[:300]
    return ""


def outcome(done: concurrent.futures.Future[str]) -> str:
    """What `attempt` said, or that its worker died."""
    try:
        return done.result()
    except BrokenProcessPool as failure:
        return f"{BROKEN}: {failure}"


class Compiler:
    """Worker processes that compile for a compute capability; without any (jobs=0) a launch compiles for itself."""

    def __init__(self, jobs: int, capability: int = 90) -> None:
        self.works = False  # whether a worker has compiled anything
        self._pool = None
        if jobs > 0:
            # spawn: a CUDA context does not survive a fork
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                jobs, mp_context=context, initializer=start_worker, initargs=(capability,)
            )
            # they import torch while the caller makes its inputs
            for _ in range(jobs):
                self._pool.submit(ready)

    def each(self, work: Iterable[tuple[Problem, Pair]], seconds: float = ROUND_SECONDS) -> Iterable[tuple[int, str]]:
        """(index, problem or nothing) of all candidates, as they get ready; TOO_SLOW for those left after `seconds`."""
        work = list(work)
        if self._pool is None:
            yield from ((i, "") for i in range(len(work)))
            return
        try:
            futures = {self._pool.submit(attempt, p, pair): i for i, (p, pair) in enumerate(work)}
        except BrokenProcessPool as failure:
            self._pool = None
            yield from ((i, f"{BROKEN}: {failure}") for i in range(len(work)))
            return
        try:
            for done in concurrent.futures.as_completed(futures, timeout=max(0.0, min(seconds, ROUND_SECONDS))):
                index, problem = futures.pop(done), outcome(done)
                self.works = self.works or not problem
                yield index, problem
        except TimeoutError:
            for late, i in futures.items():
                yield i, outcome(late) if late.done() else TOO_SLOW
        finally:
            # also where the caller has seen enough
            for late in futures:
                late.cancel()

    def compile(self, work: Iterable[tuple[Problem, Pair]]) -> tuple[int, float]:
        """Compiles all of it; (how many, seconds). What can't be compiled shows where it is launched."""
        started = time.monotonic()
        count = len(list(self.each(dict.fromkeys(work))))
        return count, time.monotonic() - started

    def close(self) -> None:
        """Stops the workers, whatever they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()


def default_jobs() -> int:
    """Worker processes for this machine; two cores are left to whoever measures."""
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0)) - 2))
