"""The self-check passes right operations, names wrong ones, and sends their whole family to vLLM's own kernels."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.lora_cases import DEVICE, DTYPES

from lorahost_kernels import configs, self_check
from lorahost_kernels.operations import DENSE, MOE, OPERATIONS
from lorahost_kernels.self_check import batches, checks, paths

DTYPE = DTYPES[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces all checks but the given ones by one that passes."""

    def only(*names: str) -> None:
        for name in set(OPERATIONS) - set(names):
            monkeypatch.setitem(checks.CHECKS, name, lambda *_: 0.0)

    return only


def wrong(real: Any, change: Callable[..., None]) -> Any:
    """An operation whose outputs are changed."""

    def run(*args: Any) -> Any:
        out = real(*args)
        change(out, *args)
        return out

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_operations_take_their_kernels(dtype: torch.dtype) -> None:
    found = self_check.run(DEVICE, dtype)
    assert (found.moe, found.dense) == ("triton", "triton")
    assert list(found.outcomes) == list(OPERATIONS)
    for name, outcome in found.outcomes.items():
        assert outcome.path == "triton"
        assert outcome.error <= (0 if name in checks.EXACT else paths.LIMITS[dtype])
        assert outcome.reason.startswith("self-check passed: error")
        assert outcome.seconds > 0


def test_every_operation_has_a_check() -> None:
    assert set(checks.CHECKS) == set(OPERATIONS) == {*MOE, *DENSE}


def scale_hidden(out: Any, *_: Any) -> None:
    out.mul_(1.02)


def scale_output(_: Any, y: Any, *__: Any) -> None:
    y.mul_(1.02)


def shift_pairs(out: Any, *_: Any) -> None:
    out.work.sorted_pairs.copy_(out.work.sorted_pairs.roll(1))


def swap_rows(out: Any, *_: Any) -> None:
    out.row_pairs.copy_(out.row_pairs.flip(0))


WRONG = {
    **dict.fromkeys(("gate_up_shrink", "down_shrink", "shrink"), scale_hidden),
    **dict.fromkeys(("gate_up_expand", "down_expand", "expand", "expand_swiglu", "expand_topk_sum"), scale_output),
    "work_list": shift_pairs,
    "expert_order": swap_rows,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_operation_is_named_and_its_family_falls_back(
    name: str, quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    quick(name)
    launcher = "build_work_list" if name == "work_list" else name
    monkeypatch.setattr(checks, launcher, wrong(getattr(checks, launcher), WRONG[name]))
    found = self_check.run(DEVICE, DTYPE)
    family, other = (MOE, DENSE) if name in MOE else (DENSE, MOE)
    assert (found.moe, found.dense) == (("stock", "triton") if name in MOE else ("triton", "stock"))
    assert {found.outcomes[n].path for n in family} == {"stock"}
    assert {found.outcomes[n].path for n in other} == {"triton"}
    assert found.outcomes[name].reason.startswith("self-check failed: ")
    for sibling in set(family) - {name}:
        assert found.outcomes[sibling].reason.startswith(f"falls back with {name}; self-check passed")
    errors = [record.getMessage() for record in plugin_log.records if record.levelno >= logging.ERROR]
    assert any(name in line and "failed" in line for line in errors)
    assert any("vLLM's own kernels" in line for line in errors)


def test_error_and_limit_are_said(
    quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    quick()
    monkeypatch.setitem(checks.CHECKS, "shrink", lambda *_: 0.02)
    found = self_check.run(DEVICE, torch.bfloat16).outcomes["shrink"]
    assert found.reason == "self-check failed: error 2.0e-02 is over the limit 5e-03"
    assert "shrink failed: error 2.0e-02 is over the limit 5e-03" in plugin_log.text
    assert self_check.run(DEVICE, torch.bfloat16).outcomes["shrink"].error == 0.02


def poison_rows(_: Any, y: torch.Tensor, *__: Any) -> None:
    y[-1] = float("nan")


@pytest.mark.parametrize("name", ["expand", "expand_topk_sum"])
def test_nan_in_an_output_is_found(name: str, quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    quick(name)
    monkeypatch.setattr(checks, name, wrong(getattr(checks, name), poison_rows))
    assert self_check.run(DEVICE, DTYPE).outcomes[name].path == "stock"


@pytest.mark.parametrize(("name", "routing_at"), [("expand", 3), ("expand_topk_sum", 4), ("expand_swiglu", 4)])
def test_reading_a_disabled_slot_is_found(
    name: str, routing_at: int, quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(name)
    real = getattr(checks, name)

    def blind(*args: Any) -> Any:
        routing = args[routing_at]
        enabled = replace(routing, adapter_enabled=torch.ones_like(routing.adapter_enabled))
        return real(*args[:routing_at], enabled, *args[routing_at + 1 :])

    monkeypatch.setattr(checks, name, blind)
    assert not self_check.run(DEVICE, DTYPE).outcomes[name].passed


def test_rows_without_an_adapter_must_stay(quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    quick("down_expand")

    def change_base_row(_: Any, y: torch.Tensor, *__: Any) -> None:
        y[batches.SLOTS_OF.index(-1)] += 1

    monkeypatch.setattr(checks, "down_expand", wrong(checks.down_expand, change_base_row))
    reason = self_check.run(DEVICE, DTYPE).outcomes["down_expand"].reason
    assert reason == "self-check failed: WrongResultError: rows without LoRA work were changed"


def test_an_exception_is_a_fallback(
    quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    quick("expand_swiglu")

    def broken(*_: Any) -> None:
        raise RuntimeError("PTX assembly aborted\nmore lines")

    monkeypatch.setattr(checks, "expand_swiglu", broken)
    found = self_check.run(DEVICE, DTYPE)
    assert (found.moe, found.dense) == ("stock", "triton")
    assert found.outcomes["expand_swiglu"].reason == "self-check failed: RuntimeError: PTX assembly aborted"
    assert found.facts()["expand_swiglu"]["error"] is None
    assert "Traceback" in plugin_log.text


def test_a_device_that_fails_for_good_stops_the_start(
    quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick("expand")

    def dead(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(checks.CHECKS, "expand", dead)
    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(self_check.UnusableDeviceError, match=r"expand left cuda:0 unusable .*LORAHOST_KERNELS=off"):
        self_check.run(torch.device("cuda:0"), DTYPE)


def test_no_check_while_a_graph_is_captured(quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    quick()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        self_check.run(torch.device("cuda:0"), DTYPE)


def test_a_dtype_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.float64 is none of torch.bfloat16, torch.float16, torch.float32"):
        self_check.run(DEVICE, torch.float64)


def test_once_a_process(quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    quick()
    monkeypatch.setattr(paths, "_found", {})
    first = self_check.paths_for(DEVICE, DTYPES[0])
    monkeypatch.setitem(checks.CHECKS, "shrink", lambda *_: 1.0)
    assert self_check.paths_for(DEVICE, DTYPES[0]) is first
    assert self_check.paths_for(DEVICE, DTYPES[1]).dense == "stock"


def test_the_callers_state_stays_as_it_is(quick: Callable[..., None]) -> None:
    """vLLM builds the wrapper under a default dtype, with seeds set and perhaps tuned tiles."""
    quick("expert_order", "work_list", "expand")

    class Forbidden:
        def block_m(self, *_: Any) -> Any:
            raise AssertionError("tuned tiles were asked for")

        tiles = block_m

    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float16)
    configs.use(Forbidden())
    try:
        found = self_check.run(DEVICE, DTYPE)
    finally:
        configs.use(None)
        torch.set_default_dtype(torch.float32)
    assert (found.moe, found.dense) == ("triton", "triton")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_facts_are_json(quick: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    quick()
    monkeypatch.setitem(checks.CHECKS, "expand", lambda *_: float("nan"))
    facts = json.loads(json.dumps(self_check.run(DEVICE, DTYPE).facts(), allow_nan=False))
    assert list(facts) == list(OPERATIONS)
    assert facts["expand"].keys() == {"path", "reason", "error", "seconds"}
    assert (facts["expand"]["path"], facts["expand"]["error"]) == ("stock", None)


@pytest.mark.parametrize("dense", [False, True])
def test_batches_have_every_kind_of_row(dense: bool) -> None:
    for tokens in (batches.DECODE, batches.PREFILL):
        b = batches.batch(DEVICE, DTYPE, tokens, dense, None)
        slots = set(b.routing.token_slots.tolist())
        assert {-1, 0, 1, 2, batches.DISABLED, 99} == slots
        assert b.routing.adapter_enabled.tolist() == [1, 1, 1, 0, 1]
        assert 0 < int(b.working.sum()) < b.routing.num_pairs
        assert b.weights((batches.RANK, batches.HIDDEN))[0][batches.DISABLED].isnan().all()
        if not dense:
            assert b.routing.topk_ids is not None
            assert (b.routing.topk_ids == -1).any()


@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_made_in_torch_hold_what_the_kernel_makes(block_m: int) -> None:
    routing = batches.batch(DEVICE, DTYPE, batches.PREFILL, False, None).routing
    ours = checks.groups_in(batches.with_tiles(routing, block_m))
    assert ours == checks.groups_in(checks.build_work_list(routing, batches.SLOTS, block_m))
    assert max(map(len, ours.values())) > 16
