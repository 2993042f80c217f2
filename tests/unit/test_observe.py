from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from lorahost.adapters.events import ChangeFailed, Residency, StageFinished, StateChanged, Warned
from lorahost.metrics import Metrics
from lorahost.observe import RegistryObserver


class Observed:
    def __init__(self, max_adapters: int = 4) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(max_adapters, self.registry)
        self.observe = RegistryObserver(self.metrics)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"lorahost_{name}", labels)


@pytest.fixture
def observed() -> Observed:
    return Observed()


def test_adapters_are_counted_by_state(observed: Observed) -> None:
    observed.observe(StateChanged("a", None, "fetching"))
    observed.observe(StateChanged("b", None, "fetching"))
    observed.observe(StateChanged("a", "fetching", "ready"))
    assert observed.value("adapters", state="fetching") == 1
    assert observed.value("adapters", state="ready") == 1
    observed.observe(StateChanged("a", "ready", None))
    assert observed.value("adapters", state="ready") == 0


def test_a_gone_adapter_gives_its_label_back() -> None:
    observed = Observed(max_adapters=1)
    assert observed.metrics.adapter("a") == "a"
    observed.observe(StateChanged("a", "draining", None))
    assert observed.metrics.adapter("b") == "b"


def test_stages_failures_and_warnings(observed: Observed, caplog: pytest.LogCaptureFixture) -> None:
    observed.observe(StageFinished("a", "fetch", 0.5))
    assert observed.value("adapter_load_seconds_sum", stage="fetch") == 0.5
    with caplog.at_level(logging.WARNING, "lorahost.observe"):
        observed.observe(ChangeFailed("a", "rank_too_large", "rank 64 is above 32"))
        observed.observe(Warned("a", "no effect on the probe"))
    assert observed.value("adapter_load_failures_total", code="rank_too_large") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "adapter a: rank 64 is above 32",
        "adapter a: no effect on the probe",
    ]


def test_residency_is_shown_while_it_lasts(observed: Observed) -> None:
    observed.observe(Residency("a", "d" * 64, 1, "loaded"))
    assert observed.value("adapter_loaded", adapter="a", version="d" * 12) == 1
    observed.observe(Residency("a", "d" * 64, 1, "evicted"))
    assert observed.value("adapter_loaded", adapter="a", version="d" * 12) is None
    observed.observe(Residency("a", "d" * 64, 2, "refused"))
    for change in ("loaded", "evicted", "refused"):
        assert observed.value("adapter_residency_changes_total", change=change) == 1


def test_a_version_that_leaves_after_its_name_leaves_no_label_behind() -> None:
    observed = Observed(max_adapters=1)
    observed.observe(Residency("a", "d" * 64, 1, "loaded"))
    observed.observe(StateChanged("a", "draining", None))
    observed.observe(Residency("b", "e" * 64, 2, "loaded"))
    observed.observe(Residency("a", "d" * 64, 1, "removed"))
    assert observed.metrics.adapter("b") == "b"
    assert observed.value("adapter_loaded", adapter="b", version="e" * 12) == 1
    assert observed.value("adapter_loaded", adapter="a", version="d" * 12) is None


def test_the_label_of_the_load_is_the_label_of_the_removal() -> None:
    observed = Observed(max_adapters=1)
    observed.metrics.adapter("first")
    observed.observe(Residency("late", "d" * 64, 1, "loaded"))
    assert observed.value("adapter_loaded", adapter="other", version="d" * 12) == 1
    observed.metrics.forget("first")
    assert observed.metrics.adapter("late") == "late"
    observed.observe(Residency("late", "d" * 64, 1, "removed"))
    assert observed.value("adapter_loaded", adapter="other", version="d" * 12) is None
