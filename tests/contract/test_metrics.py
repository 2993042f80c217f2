"""/metrics is Prometheus text, quick, and counts what happened (contract 43)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.running import Server, running

from lorahost_kernels.operations import PRODUCTS


def samples(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples by name and labels, read by Prometheus' own parser."""
    answer = server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def change(server: Server, what: Callable[[], object]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What `what` adds to each sample."""
    before = samples(server)
    what()
    after = samples(server)
    return {key: value - before.get(key, 0.0) for key, value in after.items() if value != before.get(key, 0.0)}


def test_requests_and_tokens_are_counted_for_each_adapter(server: Server) -> None:
    added = change(server, lambda: server.invoke({"prompt": "a b c", "max_tokens": 4}, "a1"))
    assert added["lorahost_requests_total", (("adapter", "a1"), ("code", "200"))] == 1
    assert added["lorahost_tokens_total", (("adapter", "a1"), ("kind", "prompt"))] == 3
    assert added["lorahost_tokens_total", (("adapter", "a1"), ("kind", "output"))] == 4
    added = change(server, lambda: server.invoke({"prompt": "a", "max_tokens": 4, "stream": True}))
    assert added["lorahost_ttft_seconds_count", (("adapter", "base"),)] == 1
    assert added["lorahost_inter_token_seconds_count", (("adapter", "base"),)] >= 3


def test_refusals_are_counted_by_reason(server: Server) -> None:
    added = change(server, lambda: server.invoke(adapter="gone"))
    assert added["lorahost_rejected_total", (("adapter", "other"), ("reason", "adapter_not_found"))] == 1


def test_adapter_changes_are_counted(server: Server, adapter: Callable[..., Path], tmp_path: Path) -> None:
    added = change(server, lambda: server.add("m1", adapter("m1")))
    assert added["lorahost_adapters", (("state", "ready"),)] == 1
    assert added["lorahost_adapter_load_seconds_count", (("stage", "load"),)] == 1
    removed = change(server, lambda: server.remove("m1"))
    assert removed["lorahost_adapters", (("state", "ready"),)] == -1
    failed = change(server, lambda: server.add("m2", tmp_path / "nowhere"))
    assert sum(value for (name, _), value in failed.items() if name == "lorahost_adapter_load_failures_total") == 1
    server.remove("m2")


def test_names_of_callers_do_not_become_labels(server: Server) -> None:
    added = change(server, lambda: [server.invoke(adapter=f"guess-{i}") for i in range(20)])
    assert not any("guess" in value for _, labels in added for _, value in labels)


def test_it_takes_less_than_a_tenth_of_a_second(server: Server) -> None:
    times = []
    for _ in range(10):
        began = time.monotonic()
        server.get("/metrics")
        times.append(time.monotonic() - began)
    assert sorted(times)[5] < 0.1


@pytest.mark.parametrize("name", ["lorahost_ready", "lorahost_slots", "lorahost_running", "lorahost_draining"])
def test_the_gauges_are_there(server: Server, name: str) -> None:
    assert (name, ()) in samples(server)


def test_what_runs_the_lora_operations_is_there(server: Server) -> None:
    found = {labels: value for (name, labels), value in samples(server).items() if name == "lorahost_kernel_path"}
    assert found == {(("operation", name), ("path", "none")): 1 for name in PRODUCTS}
    assert samples(server)["lorahost_kernel_fallbacks", (("operation", "shrink"),)] == 0


def test_a_failed_self_check_is_a_metric_and_a_warning(tmp_path: Path) -> None:
    with running(tmp_path, engine={"fell_back": ["shrink"]}) as server:
        found = samples(server)
        assert found["lorahost_kernel_path", (("operation", "shrink"), ("path", "stock"))] == 1
        assert found["lorahost_kernel_fallbacks", (("operation", "shrink"),)] == 1
        assert found["lorahost_kernel_fallbacks", (("operation", "expand"),)] == 0
        [line] = [line for line in server.log_lines() if "LoRA operation" in line["message"]]
    assert line["level"] == "warning"
    assert line["message"].endswith("the engine's own kernels: shrink: self-check failed")
