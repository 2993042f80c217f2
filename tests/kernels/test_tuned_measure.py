"""The tuner's bench without a GPU: real kernels in the interpreter, real checks, time replaced by a count."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from lorahost_kernels.configs import ExpandConfig, ShrinkConfig
from lorahost_kernels.ops import layer
from lorahost_kernels.tune import gpu, measure
from lorahost_kernels.tune.compile import Compiler, Pair
from lorahost_kernels.tune.measure import Batch, Workbench, WrongResultError
from lorahost_kernels.tuned.shape import ModelShape, Module, MoeShape

SHAPE = ModelShape("tiny", MoeShape(4, 2, 32, 16, 2), {"qkv": Module(32, (32, 16, 16)), "o": Module(32, (32,))})
PAIRS: list[Pair] = [
    (ShrinkConfig("pair", block_k=16, ranks=4), ExpandConfig("pair", block_n=16)),
    (ShrinkConfig("list", 16, 16, 2), ExpandConfig("list", 16, 16)),
]
MODES = pytest.mark.parametrize("pair", PAIRS, ids=["pair", "list"])


def run_all(calls: Sequence[Callable[[], object]], good: float = 0.0) -> float:
    for call in calls:
        call()
    return float(len(calls))


@pytest.fixture(params=["moe", "dense"])
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(measure, "CHECK_TOKENS", 10)
    monkeypatch.setattr(measure, "LEAST_CALLS", 2)
    monkeypatch.setattr(measure, "MOST_CALLS", 2)
    monkeypatch.setattr(measure, "quick_us", run_all)
    torch.manual_seed(0)
    bench = Workbench(SHAPE, request.param, 3, 8, torch.device("cpu"), torch.float32, l2_bytes=1)
    return bench.batch(3)


def test_calls_have_inputs_of_their_own(batch: Batch) -> None:
    assert len(batch.routings) == 2
    assert batch.routings[0].token_slots is not batch.routings[1].token_slots
    for product in batch.products.values():
        assert product.layer(0, batch.routings[0]).lora_a[0] is not product.layer(1, batch.routings[1]).lora_a[0]


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
        {"gate_up": layer.gate_up, "dense": layer.linear}[kind](y, *args, **kwargs)  # type: ignore[arg-type]
        y[..., 0] += 0.3

    monkeypatch.setitem(measure.PRODUCTS, kind, (off_by_a_percent, *measure.PRODUCTS[kind][1:]))
    with pytest.raises(WrongResultError, match=f"{name}: relative error"):
        batch.time(name, pair, 1.0)
    said: list[str] = []
    bench = gpu.GpuBench(batch, Compiler(0, False), said.append)
    assert bench.measure([((name, None), pair)]) == [float("inf")]
    assert not bench.right({name: pair})
    assert "dropped" in said[0]


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
