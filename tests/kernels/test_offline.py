"""Kernels compile for GPUs that are not there, without spills, and in few variants over all batch sizes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(what: str) -> Any:
    """The JSON that tests.kernels.offline prints, from a process of its own without the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.offline", what], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_compiles_for_sm_80_90_and_100_within_its_registers() -> None:
    found = run("compile")
    assert {u["sm"] for u in found} == {80, 90, 100}
    for u in found:
        print(*u.values())
        # 255 registers a thread are all there are; up to rank 64 at least two programs fit a multiprocessor
        assert u["registers"] <= 255, u
        assert "256" in u["shape"] or u["registers"] * 32 * u["warps"] <= 65536 // 2, u
        assert u["spilled"] == 0, u
        assert u["shared"] <= (227 if u["sm"] >= 90 else 163) * 1024, u


def test_few_variants_serve_every_batch_size() -> None:
    for kernel, count in run("variants").items():
        print(kernel, count)
        assert count <= (1 if kernel.startswith("work list") else 12), (kernel, count)
