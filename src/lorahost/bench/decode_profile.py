"""Where a decode step's time goes, from a profiler's trace of many steps; standard library only."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from lorahost.bench.formatting import markdown, short

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
SHORT_GAP = 20.0
NAME_LENGTH = 60
SUMMARY = (
    ("steps seen", "steps"),
    ("span, us", "span_us"),
    ("busy, us", "busy_us"),
    ("idle between kernels, us", "between_us"),
    ("idle waiting for the host, us", "waiting_us"),
    ("overlapped, us", "overlapped_us"),
    ("kernels", "kernels"),
    ("host time of a graph launch, us", "launch_us"),
)


class Kernel(TypedDict):
    """All calls of one name: how many a step, and their microseconds a step."""

    count: float
    us: float


class Profile(TypedDict):
    """Means of a step; `*_us` in microseconds.

    `span_us` is `busy_us`, in which anything runs on the GPU, and two idle times: `between_us` in gaps of up to
    `SHORT_GAP`, `waiting_us` in longer ones, which the host leaves. `overlapped_us` is what ran beside something else:
    the times in `by_name` add up to `busy_us` and it. `launch_us` is what a graph launch takes on the host, None where
    the profiler doesn't see it: it has no calls of the driver's own `cuGraphLaunch`.
    """

    steps: int
    span_us: float
    busy_us: float
    between_us: float
    waiting_us: float
    overlapped_us: float
    kernels: float
    launch_us: float | None
    by_name: dict[str, Kernel]


class _Work(NamedTuple):
    """One kernel, copy or fill on the GPU; times in microseconds."""

    start: float
    end: float
    name: str
    launch: int


def summarise(trace: Mapping[str, Any]) -> Profile:
    """A step's means over the whole steps of a trace: from the first work of one graph on the GPU to that of the next.

    A step is what one CUDA graph is launched for; what runs between two graphs belongs to the first. Steps that the
    trace has in part, at its beginning and end, are left out. All work of a launch has the launch's number, so two
    kernels of one number are a graph's even if the trace has no such launch.

    Args:
        trace: As torch.profiler's `export_chrome_trace` writes it.

    Raises:
        ValueError: fewer than two graphs began in it, so there is no whole step.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = _launches(events)
    kernels = Counter(_launch(event) for event in events if event.get("cat") == "kernel")
    graphs = launches.keys() | {launch for launch, count in kernels.items() if count > 1}
    work = [_Work(e["ts"], e["ts"] + e["dur"], e["name"], _launch(e)) for e in events if e.get("cat") in GPU]
    work.sort(key=lambda one: one.start)
    starts: dict[int, float] = {}
    for one in work:
        if one.launch in graphs:
            starts.setdefault(one.launch, one.start)
    # a graph that was launched before the profile may have begun before it, too
    if starts and (first := next(iter(starts))) not in launches:
        del starts[first]
    if len(starts) < 2:
        raise ValueError(f"CUDA graphs that began in the profile: {len(starts)}; a step lasts from one to the next")
    begin, end = min(starts.values()), max(starts.values())
    inside = [one._replace(end=min(one.end, end)) for one in work if begin <= one.start < end]
    return _means(inside, end, len(starts) - 1, launches)


def _launches(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Graph launches on the host by the number that their work on the GPU has, too, and their microseconds."""
    found: dict[int, float] = {}
    for event in events:
        # names may end with a version: cuGraphLaunch_v2
        if event.get("cat") in RUNTIME and event["name"].partition("_")[0] in LAUNCHES:
            number = _launch(event)
            # a runtime call and the driver's call inside it have the same number
            found[number] = max(event["dur"], found.get(number, 0.0))
    return found


def _launch(event: Mapping[str, Any]) -> int:
    number: int = event["args"]["correlation"]
    return number


def _means(work: Sequence[_Work], end: float, steps: int, launches: Mapping[int, float]) -> Profile:
    """Of the work of whole steps in order of its start; the last one ends at `end`."""
    gaps = list(_gaps(work, end))
    span, idle = end - work[0].start, sum(gaps)
    between = sum(gap for gap in gaps if gap <= SHORT_GAP)
    calls: dict[str, list[float]] = {}
    for one in work:
        calls.setdefault(one.name, []).append(one.end - one.start)
    return {
        "steps": steps,
        "span_us": span / steps,
        "busy_us": (span - idle) / steps,
        "between_us": between / steps,
        "waiting_us": (idle - between) / steps,
        "overlapped_us": (sum(one.end - one.start for one in work) - (span - idle)) / steps,
        "kernels": len(work) / steps,
        "launch_us": statistics.fmean(launches.values()) if launches else None,
        "by_name": {name: {"count": len(us) / steps, "us": sum(us) / steps} for name, us in calls.items()},
    }


def _gaps(work: Sequence[_Work], end: float) -> Iterator[float]:
    """Microseconds in which nothing runs, from the first work to `end`."""
    reached = work[0].start
    for one in work:
        if one.start > reached:
            yield one.start - reached
        reached = max(reached, one.end)
    if end > reached:
        yield end - reached


def table(profiles: Mapping[str, Profile], rows: int = 30) -> str:
    """A column for each engine: a step's means, then what takes longest in any of them.

    Args:
        profiles: By the engine's name.
        rows: Names of kernels at most; the others are added up in the last line.
    """
    found = [profile["by_name"] for profile in profiles.values()]
    longest: dict[str, float] = {}
    for kernels in found:
        for name, kernel in kernels.items():
            longest[name] = max(kernel["us"], longest.get(name, 0.0))
    ranked = sorted(longest, key=lambda name: (-longest[name], name))
    lines = [["a step", *profiles]]
    lines += [[title, *(_figure(profile, key) for profile in profiles.values())] for title, key in SUMMARY]
    lines += [[_shown(name), *(_cell(kernels, [name]) for kernels in found)] for name in ranked[:rows]]
    if rest := ranked[rows:]:
        lines.append([f"{len(rest)} others", *(_cell(kernels, rest) for kernels in found)])
    return f"Of a kernel: microseconds a step (calls a step).\n\n{markdown(lines)}"


def _figure(profile: Mapping[str, Any], key: str) -> str:
    return "-" if profile[key] is None else short(profile[key])


def _shown(name: str) -> str:
    """A name that fits a cell; those of C++ templates can have thousands of characters."""
    return name[:NAME_LENGTH].replace("|", "\\|")


def _cell(kernels: Mapping[str, Kernel], names: Iterable[str]) -> str:
    mine = [kernels[name] for name in names if name in kernels]
    if not mine:
        return "-"
    return f"{short(sum(kernel['us'] for kernel in mine))} ({short(sum(kernel['count'] for kernel in mine))})"
