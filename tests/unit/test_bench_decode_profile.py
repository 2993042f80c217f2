"""Where a step's time goes, from traces made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lorahost.bench.decode_profile import NAME_LENGTH, Profile, summarise, table

Event = dict[str, Any]


def work(name: str, start: float, us: float, launch: int, cat: str = "kernel") -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "args": {"correlation": launch}}


def call(start: float, us: float, launch: int, name: str = "cudaGraphLaunch", cat: str = "cuda_runtime") -> Event:
    return work(name, start, us, launch, cat)


def step(start: float, launch: int) -> list[Event]:
    """200 us: a graph of three kernels, of which the second begins before the first ends, a copy, and gaps."""
    return [
        work("gemm", start, 50.0, launch),
        work("lora", start + 40.0, 20.0, launch),  # 10 us beside gemm
        work("gemm", start + 65.0, 35.0, launch),  # after 5 us
        work("Memcpy DtoH", start + 120.0, 10.0, 1000 + launch, "gpu_memcpy"),  # after 20 us
    ]  # then 70 us until the next


def trace(*events: Event) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, {"ph": "i", "cat": "kernel", "ts": 0.0}, *events]}


def three(**more: Any) -> Profile:
    steps = [event for n in range(3) for event in step(1000.0 + 200.0 * n, n + 1)]
    return summarise(trace(*reversed(steps), *(call(900.0 + 200.0 * n, 6.0 + n, n + 1, **more) for n in range(3))))


def test_the_time_of_a_step_is_busy_or_idle() -> None:
    found = three()
    assert found == {
        "steps": 2, "span_us": 200.0, "busy_us": 105.0, "between_us": 25.0, "waiting_us": 70.0, "overlapped_us": 10.0,
        "kernels": 4.0, "launch_us": 7.0,
        "by_name": {
            "gemm": {"count": 2.0, "us": 85.0}, "lora": {"count": 1.0, "us": 20.0},
            "Memcpy DtoH": {"count": 1.0, "us": 10.0},
        },
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found


def test_only_whole_steps_count() -> None:
    # the end of a step that was launched before, the beginning of one that runs on, and what another call started
    before = [work("gemm", 970.0, 5.0, 7), work("gemm", 980.0, 10.0, 7)]
    last = [work("gemm", 1400.0, 50.0, 3), work("other", 1390.0, 40.0, 9)]
    found = summarise(
        trace(*before, *step(1000.0, 1), *step(1200.0, 2), *last, *(call(900.0, 6.0, n) for n in (1, 2, 3)))
    )
    assert (found["steps"], found["span_us"], found["by_name"]["gemm"]) == (2, 200.0, {"count": 2.0, "us": 85.0})
    # up to the last step's start: 10 of 40 us, half of that a step
    assert found["by_name"]["other"] == {"count": 0.5, "us": 5.0}
    assert (found["busy_us"], found["waiting_us"]) == (110.0, 65.0)


def test_what_ends_beside_something_longer_leaves_no_gap() -> None:
    steps = [
        [work("long", s, 80.0, n), work("short", s + 10.0, 5.0, n), work("next", s + 80.0, 20.0, n)]
        for n, s in ((1, 0.0), (2, 100.0))
    ]
    found = summarise(trace(*steps[0], *steps[1], call(0.0, 1.0, 1), call(0.0, 1.0, 2)))
    assert (found["busy_us"], found["between_us"], found["waiting_us"], found["overlapped_us"]) == (
        100.0,
        0.0,
        0.0,
        5.0,
    )


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuGraphLaunch_v2"])
def test_the_driver_s_launches_count_too(name: str) -> None:
    assert three(name=name, cat="cuda_driver") == three()
    both = [event for n in (1, 2) for event in (call(0.0, 9.0, n), call(1.0, 5.0, n, name, "cuda_driver"))]
    assert summarise(trace(*step(0.0, 1), *step(200.0, 2), *both))["launch_us"] == 9.0


def test_graphs_whose_launch_is_not_in_the_trace_are_known_by_their_kernels() -> None:
    found = summarise(trace(*(event for n in range(4) for event in step(200.0 * n, n + 1))))
    # the first may have begun before the trace
    assert (found["steps"], found["span_us"], found["launch_us"]) == (2, 200.0, None)
    assert "| host time of a graph launch, us | - |" in table({"ours": found})
    mixed = [event for n in range(4) for event in step(200.0 * n, n + 1)]
    assert summarise(trace(*mixed, call(0.0, 6.0, 1), call(400.0, 8.0, 3)))["steps"] == 3


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([work("gemm", 10.0 * n, 5.0, n) for n in range(9)], 0),
        ([work("gemm", 10.0 * n, 5.0, n) for n in range(9)] + [call(0.0, 1.0, 3, "cudaLaunchKernel")], 0),
        ([*step(0.0, 1), call(0.0, 1.0, 1), call(100.0, 1.0, 2)], 1),
        ([*step(0.0, 1), *step(200.0, 2)], 1),
    ],
)
def test_without_two_graphs_there_is_no_step(events: list[Event], count: int) -> None:
    with pytest.raises(ValueError, match=f"CUDA graphs that began in the profile: {count};"):
        summarise(trace(*events))


def test_a_table_has_a_column_for_each_engine_and_what_takes_longest_first() -> None:
    base, ours = three(), three()
    long = "void cutlass::gemm<a | b>" * 9
    ours["by_name"] = {"gemm": {"count": 2.0, "us": 90.0}, long: {"count": 24.0, "us": 1234.5}}
    ours["span_us"] = 1500.0
    lines = table({"base": base, "ours": ours}, rows=2).splitlines()
    assert lines[2:4] == ["| a step | base | ours |", "| --- | --- | --- |"]
    assert lines[4:12] == [
        "| steps seen | 2 | 2 |",
        "| span, us | 200.0 | 1500 |",
        "| busy, us | 105.0 | 105.0 |",
        "| idle between kernels, us | 25.0 | 25.0 |",
        "| idle waiting for the host, us | 70.0 | 70.0 |",
        "| overlapped, us | 10.0 | 10.0 |",
        "| kernels | 4 | 4 |",
        "| host time of a graph launch, us | 7 | 7 |",
    ]
    shown = long[:NAME_LENGTH].replace("|", "\\|")
    assert lines[12:] == [
        f"| {shown} | - | 1234 (24.0) |", "| gemm | 85.0 (2) | 90.0 (2) |", "| 2 others | 30.0 (2) | - |",
    ]  # fmt: skip
    assert "others" not in table({"base": base, "ours": ours})
