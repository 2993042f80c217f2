"""What one request's events say, and what many requests' say together; standard library only."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Record:
    """One request. Times are in seconds on one monotonic clock; `at` holds when each event with tokens came."""

    adapter: str
    start: float
    at: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.at[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds from the request to its last token."""
        return self.at[-1] - self.start

    @property
    def otps(self) -> float:
        """Output tokens per second: tokens after the first, over the time from the first to the last."""
        return (self.tokens - 1) / (self.at[-1] - self.at[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events; an event may carry several tokens."""
        return [b - a for a, b in pairwise(self.at)]


def error_kinds(records: Sequence[Record]) -> str:
    """Errors and how often each came: `HTTP 429 x 3; timeout x 1`. Empty without errors."""
    kinds = Counter(r.error.partition(": ")[0] for r in records if r.error)
    return "; ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as NumPy's default; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(records: Sequence[Record], seconds: float) -> dict[str, float]:
    """One repeat's figures; a request with an error counts as such and in no other figure.

    Args:
        records: All requests of the repeat.
        seconds: Its length, first request to last token.

    Returns:
        `otps_*` in tokens a second and request, `throughput` in tokens a second of all requests, `*_ms` in
        milliseconds, `tokens_per_step` as tokens an event after the first, `in_flight` as requests on average over
        all of `seconds`.
    """
    nan = float("nan")
    good = [r for r in records if not r.error]
    many = [r for r in good if r.tokens > 1 and len(r.at) > 1]
    gaps = [gap * 1e3 for r in many for gap in r.gaps]
    ttft, latency = [r.ttft * 1e3 for r in good], [r.latency * 1e3 for r in good]
    otps = [r.otps for r in many]
    return {
        "requests": len(records),
        "errors": len(records) - len(good),
        "prompt_tokens": statistics.fmean(r.prompt_tokens for r in good) if good else nan,
        "tokens": sum(r.tokens for r in good),
        "seconds": seconds,
        "throughput": sum(r.tokens for r in good) / seconds,
        "otps_p50": percentile(otps, 50),
        "otps_mean": statistics.fmean(otps) if otps else nan,
        "otps_p1": percentile(otps, 1),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_mean_ms": statistics.fmean(ttft) if ttft else nan,
        "ttft_p99_ms": percentile(ttft, 99),
        "ttft_max_ms": max(ttft, default=nan),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "latency_p50_ms": percentile(latency, 50),
        "latency_mean_ms": statistics.fmean(latency) if latency else nan,
        "latency_max_ms": max(latency, default=nan),
        "tokens_per_step": sum(r.tokens - 1 for r in many) / sum(len(r.at) - 1 for r in many) if many else nan,
        "in_flight": sum(latency) / 1e3 / seconds,
    }
