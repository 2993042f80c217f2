"""Compiles candidates in worker processes: Triton's cache on disk then has what the measuring process launches."""

import concurrent.futures
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig, max_tiles
from lorahost_kernels.ops.common import launch, replay
from lorahost_kernels.ops.common.routing import Routing, WorkList, slice_columns, unweighted
from lorahost_kernels.tuned.shape import Module, MoeShape

Pair = tuple[ShrinkConfig, ExpandConfig]
ROUND_SECONDS = 60.0  # for all candidates of a round; what is not ready by then isn't worth more
TOO_SLOW = "not compiled in time"


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

    @property
    def operations(self) -> tuple[str, str]:
        """Names of its shrink and its expand."""
        return (f"{self.half}_shrink", f"{self.half}_expand") if self.moe else ("shrink", "expand")

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
        work=work,
    )


def warm_up(kernel: Any, key: Any, pointers: tuple[Tensor, ...], constants: Callable[[], Any]) -> None:
    """Stands in for `replay.launch`: compiles instead of launching."""
    programs, args, options = constants()
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
    first, second = p.operations
    h = launch.run_shrink(kernel_of(first), first, x, a, routing, down, shrink)
    routing = routing if down else unweighted(routing)
    launch.run_expand(kernel_of(second), second, y, h, b, routing, slice_columns(b), True, expand)


def kernel_of(operation: str) -> Any:
    """The Triton kernel of an operation."""
    return getattr(importlib.import_module(f"lorahost_kernels.ops.{operation}.kernel"), f"{operation}_kernel")


def start_worker(pdl: bool) -> None:
    """Makes this process one that compiles; tensors without memory have no device to ask about PDL."""
    torch.set_num_threads(1)
    launch.has_pdl = lambda device: pdl  # type: ignore[assignment]
    replay.launch = warm_up


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
        return f"a worker died: {failure}"


class Compiler:
    """Worker processes; without any (jobs=0) everything is compiled where it is launched."""

    def __init__(self, jobs: int, pdl: bool) -> None:
        self._pool = None
        if jobs > 0:
            # spawn: a CUDA context does not survive a fork
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                jobs, mp_context=context, initializer=start_worker, initargs=(pdl,)
            )

    def each(self, work: Iterable[tuple[Problem, Pair]]) -> Iterable[tuple[int, str]]:
        """(index, problem or nothing) of all candidates, as they get ready."""
        work = list(work)
        if self._pool is None:
            yield from ((i, "") for i in range(len(work)))
            return
        try:
            futures = {self._pool.submit(attempt, p, pair): i for i, (p, pair) in enumerate(work)}
        except BrokenProcessPool as failure:
            self._pool = None
            yield from ((i, f"the workers died: {failure}") for i in range(len(work)))
            return
        try:
            for done in concurrent.futures.as_completed(futures, timeout=ROUND_SECONDS):
                yield futures.pop(done), outcome(done)
        except TimeoutError:
            for late, i in futures.items():
                yield i, outcome(late) if late.done() else TOO_SLOW
                late.cancel()

    def close(self) -> None:
        """Stops the workers, whatever they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()


def default_jobs() -> int:
    """Worker processes for this machine."""
    return max(1, min(14, len(os.sched_getaffinity(0)) - 2))
