from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from lorahost.bench import loads, prompts
from lorahost.bench.loads import Load
from lorahost.bench.timings import Record, error_kinds, percentile, summary


@pytest.mark.parametrize("text", ["closed:16", "poisson:0.8", "poisson:12"])
def test_loads_are_read_as_they_are_written(text: str) -> None:
    assert str(Load.parse(text)) == text


@pytest.mark.parametrize("text", ["closed:0", "closed:x", "closed", "poisson:0", "poisson:-1", "poisson:inf", "open:3"])
def test_impossible_loads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"load '{text}': must be"):
        Load.parse(text)


def test_a_closed_loop_keeps_its_concurrency_and_sends_every_request_once() -> None:
    running, most, sent = 0, 0, []

    async def send(n: int, adapter: str) -> Record:
        nonlocal running, most
        running += 1
        most = max(most, running)
        sent.append((n, adapter))
        await asyncio.sleep(0)
        running -= 1
        return Record(adapter, 0.0)

    found = asyncio.run(loads.run(Load(concurrency=3), 10, itertools.cycle("ab"), send, random.Random(0)))
    assert most == 3
    assert len(found) == 10
    assert sorted(sent) == [(n, "ab"[n % 2]) for n in range(10)]


def test_an_open_loop_starts_requests_whatever_is_in_flight() -> None:
    together = asyncio.Event()
    started: list[float] = []

    async def send(n: int, adapter: str) -> Record:
        started.append(time.perf_counter())
        if len(started) == 6:
            together.set()
        # a closed loop of any smaller width would never get past this
        await asyncio.wait_for(together.wait(), 30)
        return Record(adapter, started[-1])

    asyncio.run(loads.run(Load(rate=200.0), 6, itertools.cycle("a"), send, random.Random(0)))
    due = loads.arrivals(200.0, 6, random.Random(0))
    assert started[-1] - started[0] >= (due[-1] - due[0]) * 0.9


def test_an_open_loop_has_its_rate_in_every_repeat_and_arrives_as_a_poisson_process() -> None:
    every = [loads.arrivals(2.0, 40, random.Random(seed)) for seed in range(200)]
    assert every[0] == loads.arrivals(2.0, 40, random.Random(0)) != every[1]
    for due in every:
        assert len(due) == 40
        assert due == sorted(due)
        assert 0 <= due[0] <= due[-1] < 20
    gaps = [b - a for due in every for a, b in itertools.pairwise(due)]
    # an exponential distribution's spread is its mean, and exp(-2) of its values are above twice the mean
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(20 / 41, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(mean, rel=0.05)
    assert sum(gap > 2 * mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.015)


def test_round_robin_is_even_and_zipf_prefers_the_first() -> None:
    names = ["a", "b", "c", "d"]
    even = list(itertools.islice(loads.choose(names, "round-robin", random.Random(0)), 8))
    assert even == names * 2
    drawn = Counter(itertools.islice(loads.choose(names, "zipf", random.Random(0)), 5000))
    total = sum(1 / k for k in range(1, 5))
    for k, name in enumerate(names, 1):
        assert drawn[name] / 5000 == pytest.approx(1 / k / total, abs=0.03)
    again = itertools.islice(loads.choose(names, "zipf", random.Random(0)), 5000)
    assert Counter(again) == drawn


def test_figures_of_a_repeat() -> None:
    good = Record("a", 10.0, [10.5, 10.6, 10.8], tokens=5, prompt_tokens=7)
    single = Record("b", 10.0, [10.2], tokens=1, prompt_tokens=9)
    failed = [Record("a", 10.0, [10.1], 1, error="HTTP 429: busy"), Record("a", 10.0, error="timeout: late")]
    found = summary([good, single, *failed], 2.0)
    assert (found["requests"], found["errors"], found["tokens"], found["throughput"]) == (4, 2, 6, 3.0)
    assert found["otps_p50"] == pytest.approx(4 / 0.3)
    assert found["ttft_p50_ms"] == pytest.approx(350)
    assert found["ttft_max_ms"] == pytest.approx(500)
    assert found["itl_p50_ms"] == pytest.approx(150)
    assert found["tokens_per_step"] == 2
    assert found["latency_mean_ms"] == pytest.approx(500)
    # 0.8 s and 0.2 s in 2 s
    assert found["in_flight"] == pytest.approx(0.5)
    assert found["prompt_tokens"] == 8
    assert error_kinds([good, *failed, failed[0]]) == "HTTP 429 x 2; timeout x 1"
    assert error_kinds([good]) == ""


def test_without_a_good_request_there_are_no_figures_but_the_errors() -> None:
    found = summary([Record("a", 1.0, error="HTTP 500: no")], math.nan)
    assert found["errors"] == 1
    assert all(math.isnan(found[name]) for name in ("otps_p50", "ttft_p99_ms", "latency_mean_ms", "in_flight"))


def test_percentiles_are_numpy_s() -> None:
    np = pytest.importorskip("numpy")
    values = [random.Random(1).random() for _ in range(37)]
    for percent in (0, 1, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert math.isnan(percentile([], 50))


def test_random_ids_are_repeatable_and_inside_the_vocabulary() -> None:
    ids = prompts.random_ids(1000, 500, 0, 1, 2)
    assert ids == prompts.random_ids(1000, 500, 0, 1, 2) != prompts.random_ids(1000, 500, 0, 1, 3)
    assert 10 <= min(ids) <= max(ids) < 940
    few = [prompts.random_ids(1000, 500, 16, seed) for seed in (1, 2)]
    assert few[0] != few[1]
    assert set(few[0]) == set(few[1])
    assert len(set(few[0])) == 16


def test_passages_are_a_text_in_its_order(tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(f"word{i} then\n" for i in range(20)))
    words = prompts.words_of(poem)
    found = prompts.passage(words, 30, 4)
    assert found == prompts.passage(words, 30, 4) != prompts.passage(words, 30, 5)
    assert len(found.split()) == 30
    assert "\n" in found
    around = " ".join(poem.read_text().split()) + " " + " ".join(poem.read_text().split())
    assert " ".join(found.split()) in around
    poem.write_text("too short")
    with pytest.raises(ValueError, match="2 words, at least 16"):
        prompts.words_of(poem)
    poem.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="not UTF-8"):
        prompts.words_of(poem)
