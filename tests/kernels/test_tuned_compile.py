"""Candidates compiled by worker processes: the outcome of each, whatever happens to the workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops.common import launch, replay
from lorahost_kernels.tune import compile as compiling
from lorahost_kernels.tune.compile import Compiler, Pair, Problem
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tuned.shape import KNOWN

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(KNOWN["gpt-oss-20b"].moe, "gate_up", None, 8, 32, 64)
PAIRS: list[Pair] = [(ShrinkConfig(ranks=r), ExpandConfig()) for r in (1, 2, 4)]


def fine(p: Problem, pair: Pair) -> str:
    return f"ranks {pair[0].ranks}"


def dies(p: Problem, pair: Pair) -> str:
    os._exit(3)


def hangs(p: Problem, pair: Pair) -> str:
    if pair[0].ranks == 2:
        time.sleep(60)
    return ""


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler(1)
    yield made
    made.close()


def outcomes(compiler: Compiler) -> dict[int, str]:
    return dict(compiler.each([(PROBLEM, pair) for pair in PAIRS]))


def test_every_candidate_has_an_outcome(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "attempt", fine)
    assert outcomes(compiler) == {0: "ranks 1", 1: "ranks 2", 2: "ranks 4"}


def test_workers_that_die_leave_the_work_to_the_caller(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "attempt", dies)
    assert all("died" in text for text in outcomes(compiler).values())
    assert all("died" in text for text in outcomes(compiler).values())
    assert outcomes(compiler) == {0: "", 1: "", 2: ""}


def test_a_compilation_that_hangs_costs_its_candidate(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "attempt", fine)
    outcomes(compiler)  # the worker is up
    monkeypatch.setattr(compiling, "attempt", hangs)
    monkeypatch.setattr(compiling, "ROUND_SECONDS", 1.0)
    found = outcomes(compiler)
    assert found[0] == ""
    assert found[1] == found[2] == compiling.TOO_SLOW
    compiler.close()
    for child in multiprocessing.active_children():
        child.join(10)
    assert multiprocessing.active_children() == []


def test_what_takes_longer_than_the_round_has_is_given_up(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "attempt", fine)
    outcomes(compiler)  # the worker is up
    monkeypatch.setattr(compiling, "attempt", hangs)
    found = dict(compiler.each([(PROBLEM, pair) for pair in PAIRS], 0.5))
    assert (found[0], found[1]) == ("", compiling.TOO_SLOW)
    # who has seen enough leaves nothing behind in the queue
    for _ in compiler.each([(PROBLEM, pair) for pair in PAIRS] * 5, 0.5):
        break
    assert compiler._pool is not None
    waiting = [item for item in compiler._pool._pending_work_items.values() if not item.future.cancelled()]
    assert len(waiting) <= 4


def test_what_workers_compile_is_found_by_the_launches(tmp_path: Path) -> None:
    """Without a GPU: cubins for sm_90 from worker processes; the launches with real tensors then compile nothing."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "kernels")}
    program = [sys.executable, str(Path(__file__).with_name("compile_ahead.py"))]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300, env=environ)
    found = json.loads(done.stdout)
    assert found["problems"] == []
    # shrinks and expands of both groupings, one kernel of each candidate at least
    assert found["ahead"] >= 10
    assert {"expand_swiglu_kernel", "expand_swiglu_list_kernel", "expand_topk_sum_kernel"} <= set(found["kernels"])
    assert found["launched"] > found["ahead"]
    assert found["more"] == 0


def test_without_workers_nothing_is_compiled_ahead() -> None:
    assert outcomes(Compiler(0)) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize("half", ["gate_up", "down", "", "gate_up fused", "down fused"])
@pytest.mark.parametrize("mode", ["pair", "list"])
def test_what_a_worker_compiles_is_what_is_launched(half: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same constants and dtypes as with real tensors, or the cache would have something else."""
    seen: list[object] = []

    def record(kernel: object, key: object, pointers: tuple[torch.Tensor, ...], constants: object) -> None:
        programs, args, options, _ = constants()  # type: ignore[operator]
        seen.append((programs, args, options, [(t.dtype, t.data_ptr() % 16) for t in pointers]))

    monkeypatch.setattr(replay, "launch", record)
    monkeypatch.setattr(launch, "_choices", {})
    half, _, kind = half.partition(" ")
    moe, family = half != "", "moe_fused" if kind else "moe" if half else "dense"
    shape = KNOWN["gpt-oss-20b" if kind else "qwen3-30b-a3b" if moe else "qwen3-32b"]
    p = compiling.problems(shape, Place(family, 40, 2, 16))[half or "o"]
    pair: Pair = (ShrinkConfig(mode), ExpandConfig(mode))  # type: ignore[arg-type]
    compiling.compile_pair(p, pair)
    from lorahost_kernels.tune import fused, measure

    bench = measure.Workbench.__new__(measure.Workbench)
    bench.shape, bench.family, bench.slots, bench.rank = shape, family, 2, 16
    bench.device, bench.dtype, bench.l2_bytes, bench.item = torch.device("cpu"), torch.bfloat16, 1, 2
    name = half or "o"
    x, y, *out = bench.activations(40)[name]
    routing = measure.cases.routing_of(p.moe, 40, 2, 2, bench.device)
    listed = compiling.routing_without_memory(p, 16 if mode == "list" else None).work
    if listed is not None:
        index = {"dtype": torch.int32}
        listed = type(listed)(
            torch.zeros(listed.sorted_pairs.shape, **index), torch.zeros(listed.tile_table.shape, **index),
            listed.max_tiles, listed.block_m,
        )  # fmt: skip
    a, b = bench.make_weights()[name]
    if kind:
        routing = fused.by_expert(routing)
    product = measure.Product(p, [(a, b)], [(x, y, *out)])
    measure.PRODUCTS[product.kind][0](*product.layer(0, replace(routing, work=listed)).operands, configs=pair)
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
