"""The tuner's bench without a GPU: real kernels in the interpreter, real checks, time replaced by a count."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.tune import fused, gpu, measure, plan, timing
from lorahost_kernels.tune.compile import TOO_SLOW, Compiler, Pair, Problem
from lorahost_kernels.tune.measure import Batch, Workbench, WrongResultError
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Tuner
from lorahost_kernels.tune.writer import Result, write
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import ModelShape, Module, MoeShape

SHAPE = ModelShape("tiny", MoeShape(4, 2, 32, 16, 2), {"qkv": Module(32, (32, 16, 16)), "o": Module(32, (32,))})
ONE_SLICE = replace(SHAPE, moe=MoeShape(4, 2, 32, 16, 1))
FAMILIES = ["moe", "moe_fused", "dense"]
PAIRS: list[Pair] = [
    (ShrinkConfig("pair", block_k=16, ranks=4), ExpandConfig("pair", block_n=16)),
    (ShrinkConfig("list", 16, 16, 2), ExpandConfig("list", 16, 16)),
]
MODES = pytest.mark.parametrize("pair", PAIRS, ids=["pair", "list"])


def run_all(calls: Sequence[Callable[[], object]], good: float = 0.0) -> float:
    for call in calls:
        call()
    return float(len(calls))


def shape_of(family: str) -> ModelShape:
    return ONE_SLICE if family == "moe_fused" else SHAPE


@pytest.fixture(params=FAMILIES)
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(measure, "CHECK_TOKENS", 10)
    monkeypatch.setattr(measure, "LEAST_CALLS", 2)
    monkeypatch.setattr(measure, "MOST_CALLS", 2)
    monkeypatch.setattr(measure, "quick_us", run_all)
    torch.manual_seed(0)
    bench = Workbench(shape_of(request.param), request.param, 3, 8, torch.device("cpu"), torch.float32, l2_bytes=1)
    return bench.batch(3)


def test_calls_have_inputs_of_their_own(batch: Batch) -> None:
    assert len(batch.routings) == 2
    assert batch.routings[0].token_slots is not batch.routings[1].token_slots
    for product in batch.products.values():
        assert product.layer(0, batch.routings[0]).lora_a[0] is not product.layer(1, batch.routings[1]).lora_a[0]


@pytest.mark.parametrize(("tokens", "calls"), [(1, 62), (8, 48), (20, 24), (1024, measure.LEAST_CALLS)])
def test_calls_touch_twice_the_l2_together_and_no_more(tokens: int, calls: int) -> None:
    l2, small = 64 * 1024, replace(SHAPE, modules={"o": Module(32, (32,))})
    made = Workbench(small, "dense", 1, 8, torch.device("cpu"), torch.float32, l2).batch(tokens)

    def touched(calls: int) -> int:
        layers = [made.products["o"].layer(i, made.routings[0]) for i in range(calls)]
        tensors = {t.data_ptr(): t for a in layers for t in (a.x, a.y, a.lora_a[0], a.lora_b[0])}
        return timing.bytes_of([*tensors.values()])

    assert len(made.routings) == calls
    assert touched(calls) >= 2 * l2
    assert calls == measure.LEAST_CALLS or touched(calls - 1) < 2 * l2


@MODES
def test_a_right_candidate_is_timed(batch: Batch, pair: Pair) -> None:
    for name in batch.products:
        assert batch.time(name, pair, 1.0) == 2
        assert batch.halves(name, pair) == (2, 2)
    run_all(batch.family_calls(dict.fromkeys(batch.products, pair)))
    batch.check_whole(dict.fromkeys(batch.products, pair))
    moe = "down" in batch.products
    assert batch.list_time(16) == (2 if moe else 0)


@MODES
def test_a_wrong_candidate_is_never_timed(batch: Batch, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(batch.products))
    kind = batch.products[name].kind

    def off_by_a_percent(y: torch.Tensor, *args: object, **kwargs: object) -> None:
        real = {"gate_up": layer.gate_up, "dense": layer.linear, "gate_up_fused": fused.gate_up}[kind]
        real(y, *args, **kwargs)  # type: ignore[operator]
        y[..., 0] += 0.3

    monkeypatch.setitem(measure.PRODUCTS, kind, (off_by_a_percent, *measure.PRODUCTS[kind][1:]))
    with pytest.raises(WrongResultError, match=f"{name}: relative error"):
        batch.time(name, pair, 1.0)
    said: list[str] = []
    bench = gpu.GpuBench(batch, Compiler(0), said.append)
    assert bench.measure([((name, None), pair)], math.inf) == [float("inf")]
    assert not bench.right({name: pair})
    assert "dropped" in said[0]


@MODES
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_fused_expand_that_leaves_a_row_out_is_wrong(name: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LEAST_CALLS", "MOST_CALLS"):
        monkeypatch.setattr(measure, limit, 2)
    torch.manual_seed(0)
    bench = Workbench(ONE_SLICE, "moe_fused", 3, 8, torch.device("cpu"), torch.float32, l2_bytes=1).batch(3)
    kind = f"{name}_fused"
    real = measure.PRODUCTS[kind][0]
    bench.checks.check(name, pair)
    bench.checks._good.clear()

    def forgets(out: torch.Tensor, *args: object, **kwargs: object) -> None:
        kept = out[5].clone()
        real(out, *args, **kwargs)
        out[5] = kept

    monkeypatch.setitem(measure.PRODUCTS, kind, (forgets, *measure.PRODUCTS[kind][1:]))
    with pytest.raises(WrongResultError, match=f"{name}: relative error"):
        bench.checks.check(name, pair)


def test_rows_in_the_order_of_experts() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [1, 0]], dtype=torch.int32)
    routing = fused.by_expert(Routing(torch.zeros(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32), 3, ids))
    assert routing.pair_rows is not None
    assert routing.pair_rows.tolist() == [3, 0, -1, 4, 2, 1]


class OutOfResources(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("failure", [OutOfResources("shared memory"), RuntimeError("PassManager::run failed")])
def test_tiles_that_do_not_fit_are_infinitely_slow(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def refuse(name: str, pair: Pair) -> None:
        raise failure

    monkeypatch.setattr(batch.checks, "check", refuse)
    assert batch.time(next(iter(batch.products)), PAIRS[0], 1.0) == float("inf")
    monkeypatch.setattr(batch.checks, "check", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.time(next(iter(batch.products)), PAIRS[0], 1.0)


def test_the_checks_see_rows_without_work(batch: Batch) -> None:
    routing = batch.checks.routing
    assert (routing.token_slots == -1).any()
    assert (routing.token_slots >= 3).any()
    assert not routing.adapter_enabled[2]
    wrong = replace(routing, adapter_enabled=torch.ones_like(routing.adapter_enabled))
    product = next(iter(batch.products.values()))
    a = batch.checks.products[next(iter(batch.products))].layer(0, routing)
    want = measure.reference(product, a, torch.float64)
    assert not torch.equal(want, measure.reference(product, replace(a, routing=wrong), torch.float64))


class Workers(Compiler):
    """Says of each candidate what it is told to."""

    def __init__(self, *said: str) -> None:
        super().__init__(0)
        self.said = said

    def each(self, work: Iterable[tuple[Problem, Pair]], seconds: float = 0.0) -> Iterable[tuple[int, str]]:
        for i, problem in enumerate(self.said):
            self.works = self.works or not problem
            yield i, problem


def test_what_a_worker_can_not_compile_is_not_launched_once_workers_work(batch: Batch) -> None:
    name = next(iter(batch.products))
    work = [((name, None), PAIRS[0]), ((name, 16), PAIRS[1])]
    said: list[str] = []
    assert gpu.GpuBench(batch, Workers("", "PTXASError: x"), said.append).measure(work, math.inf) == [2, math.inf]
    assert "PTXASError" in said[0]
    # no worker has compiled anything, or they are gone: it is compiled where it is launched
    for problem in ("AttributeError: x", "the workers died: x"):
        found = gpu.GpuBench(batch, Workers(problem, problem), said.append).measure(work, math.inf)
        assert found == [2, 2]
    assert gpu.GpuBench(batch, Workers(TOO_SLOW, ""), said.append).measure(work, math.inf) == [math.inf, 2]
    assert gpu.GpuBench(batch, Workers("", ""), said.append).measure(work, 0.0) == [math.inf, math.inf]


def test_a_candidate_that_breaks_the_gpu_is_named_and_not_run_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(batch.products))

    def broken(*_: object) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    work = [((name, None), PAIRS[0])]
    with monkeypatch.context() as patch:
        patch.setattr(batch, "time", broken)
        with pytest.raises(gpu.DeviceLostError, match="illegal memory access") as caught:
            gpu.GpuBench(batch, Compiler(0), print).measure(work, math.inf)
    banned = [caught.value.candidate]
    assert gpu.GpuBench(batch, Compiler(0), print, banned).measure(work, math.inf) == [math.inf]
    assert gpu.GpuBench(batch, Compiler(0), print).measure(work, math.inf) == [2]


class Graph:
    """Stands in for a CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]], warm: int | None = None) -> None:
        self.calls = calls

    def replay(self) -> None:
        run_all(self.calls)

    def reset(self) -> None:
        self.calls = []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_point_is_tuned_from_end_to_end(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything but the clock of the GPU is real."""
    for name, value in {"CHECK_TOKENS": 10, "LEAST_CALLS": 2, "MOST_CALLS": 2, "TURNS": 3}.items():
        monkeypatch.setattr(measure, name, value)
    random = Random(0)

    def spent(graph: Graph, replays: int) -> list[float]:
        graph.replay()
        return [100.0] * replays

    monkeypatch.setattr(measure, "capture", Graph)
    monkeypatch.setattr(measure, "replay_us", spent)
    monkeypatch.setattr(measure, "quick_us", lambda calls, good=0.0: run_all(calls) * random.uniform(0.5, 1.0))
    place = Place(family, 3, 3, 8)
    shape = shape_of(family)
    bench = Workbench(shape, family, 3, 8, torch.device("cpu"), torch.float32, l2_bytes=1)
    ended = time.monotonic() + 12
    said: list[str] = []
    tuner = Tuner(lambda p: plan.spaces(shape, p, 227 * 1024, 800), time.monotonic, said.append)
    results: list[Result] = []
    left = tuner.tune(
        [place], lambda p: gpu.GpuBench(bench.batch(p.tokens), Compiler(0), said.append), ended + 3, results.append
    )
    assert left == []
    assert results[0].place == place
    run = {"driver": "1", "torch": "2", "triton": "3", "git_revision": "a", "date": "2026-11-29", "mix": "m"}
    write(tmp_path / "x.json", shape, "GPU", run, results)
    assert [p.tokens for p in getattr(read(tmp_path / "x.json"), family)] == [3]
