from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lorahost.engine.fake import NO_KERNEL
from lorahost.errors import OverloadedError
from lorahost.host import Host
from lorahost.http import answering
from lorahost.lifecycle import Gate, Lifecycle, State
from lorahost.metrics import Metrics
from lorahost.settings import load_settings
from lorahost_kernels import operations


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def adapters_in(metrics: Metrics) -> set[str]:
    samples = [s for family in text_string_to_metric_families(metrics.text().decode()) for s in family.samples]
    return {s.labels["adapter"] for s in samples if "adapter" in s.labels}


def test_base_has_a_label_that_no_adapter_can_take(registry: CollectorRegistry) -> None:
    metrics = Metrics(4, registry)
    assert metrics.adapter(None) == "base"
    assert metrics.adapter("base") == "other"
    assert metrics.adapter("other") == "other"


def test_labels_are_capped(registry: CollectorRegistry) -> None:
    metrics = Metrics(2, registry)
    labels = [metrics.adapter(f"a{n}") for n in range(5)]
    assert labels == ["a0", "a1", "other", "other", "other"]
    assert metrics.adapter("a1") == "a1"


def test_names_that_come_and_go_do_not_grow_the_page(registry: CollectorRegistry) -> None:
    metrics = Metrics(3, registry)
    for number in range(50):
        label = metrics.adapter(f"a{number}")
        assert label == f"a{number}"
        metrics.requests.labels(label, "200").inc()
        metrics.ttft.labels(label).observe(0.1)
        metrics.loaded.labels(label, "abc").set(1)
        metrics.forget(f"a{number}")
    assert adapters_in(metrics) == {"a47", "a48", "a49"}


def test_an_adapter_that_comes_back_keeps_its_counts(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    metrics.requests.labels(metrics.adapter("a"), "200").inc()
    metrics.forget("a")
    assert metrics.adapter("a") == "a"
    assert metrics.adapter("b") == "other"
    assert registry.get_sample_value("lorahost_requests_total", {"adapter": "a", "code": "200"}) == 1


def test_forgetting_an_unknown_name_frees_nothing(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    metrics.adapter("a")
    metrics.forget("b")
    assert metrics.adapter("c") == "other"


def kernel(path: str, fallback: bool = False) -> dict[str, object]:
    return {"path": path, "reason": f"{path} because", "fallback": fallback}


def test_kernel_paths_are_shown_by_operation(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    assert metrics.set_kernels([{"kernels": {"shrink": kernel("triton"), "down_shrink": kernel("triton")}}] * 2) == []
    value = registry.get_sample_value
    for operation in ("shrink", "down_shrink"):
        assert value("lorahost_kernel_path", {"operation": operation, "path": "triton"}) == 1
        assert value("lorahost_kernel_path", {"operation": operation, "path": "stock"}) is None
        assert value("lorahost_kernel_fallbacks", {"operation": operation}) == 0


def test_workers_that_fell_back_are_counted_and_named(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    workers = [{"kernels": {"shrink": kernel(*found), "expand": kernel("stock")}} for found in
               (("triton",), ("stock", True), ("stock", True))]  # fmt: skip
    assert metrics.set_kernels(workers) == ["shrink: stock because"]
    value = registry.get_sample_value
    assert value("lorahost_kernel_path", {"operation": "shrink", "path": "triton"}) == 1
    assert value("lorahost_kernel_path", {"operation": "shrink", "path": "stock"}) == 1
    assert value("lorahost_kernel_fallbacks", {"operation": "shrink"}) == 2
    assert value("lorahost_kernel_fallbacks", {"operation": "expand"}) == 0, "LORAHOST_KERNELS=off is no fallback"


def test_where_tiles_come_from(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    metrics.set_kernels([{"tuned": {"active": True, "operations": {"shrink": {"source": "nearest", "rows": 3}}}}])
    labels = {"operation": "shrink", "source": "nearest"}
    assert registry.get_sample_value("lorahost_kernel_tiles", labels) == 1


def test_the_page_names_every_metric_kernel_path_and_reason_of_the_servers_own(registry: CollectorRegistry) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text()
    named = set(re.findall(r"lorahost_\w+", page))
    Metrics(4, registry)
    assert named == {one.name + ("_total" if one.type == "counter" else "") for one in registry.collect()}
    [row] = [line for line in page.splitlines() if line.startswith("| LoRA operations by path")]
    assert [path for path in (*get_args(operations.Path), NO_KERNEL["path"]) if f"`{path}`" not in row] == []
    assert "`server_busy`" in page


def test_a_request_refused_for_want_of_room_is_counted_by_its_errors_code(registry: CollectorRegistry) -> None:
    lifecycle = Lifecycle()
    lifecycle.to(State.READY)
    host: Any = SimpleNamespace(lifecycle=lifecycle, gate=Gate(0), metrics=Metrics(4, registry))
    with pytest.raises(OverloadedError) as refused:
        answering.counted(host, lambda: pytest.fail("it ran"))
    assert refused.value.code == "server_busy"
    labels = {"adapter": "other", "reason": "server_busy"}
    assert registry.get_sample_value("lorahost_rejected_total", labels) == 1


def test_every_reason_is_an_errors_code() -> None:
    sources = (Path(answering.__file__).parents[1]).rglob("*.py")
    counted = [call for file in sources for call in re.findall(r"\brejected\.labels\(.*?\)\.", file.read_text())]
    assert len(counted) >= 3
    assert [call for call in counted if not call.endswith(".code).")] == []


def test_the_gate_lets_some_more_in_than_run_and_wait(registry: CollectorRegistry) -> None:
    """As docs/architecture.md has it: admission, not the gate, is what turns requests away."""
    environ = {"LORAHOST_MAX_RUNNING": "5", "LORAHOST_MAX_QUEUED": "7", "LORAHOST_SPARE_THREADS": "40"}
    not_made: Any = None
    host = Host(load_settings(environ), not_made, not_made, metrics=Metrics(4, registry))
    assert host.gate.limit == 5 + 7 + 40 // 4


def test_an_engine_without_reports_has_no_kernels(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    assert metrics.set_kernels([]) == metrics.set_kernels([{"active": True}]) == []
    assert registry.get_sample_value("lorahost_kernel_path", {"operation": "shrink", "path": "triton"}) is None


def test_the_page_is_prometheus_text_with_our_prefix(registry: CollectorRegistry) -> None:
    metrics = Metrics(1, registry)
    metrics.ready.set(1)
    families = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    assert all(name.startswith("lorahost_") for name in families)
    assert all(family.documentation for family in families.values())
    assert families["lorahost_ready"].samples[0].value == 1
    assert families["lorahost_build_info"].samples[0].labels["python"].startswith("3.")
