"""Kernels compile for GPUs that are not there, without spills, as recorded, and in few variants over batch sizes."""

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kernels.offline_launches import GPUS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench/results/registers.csv"
REWRITE = "python -m tests.kernels.offline record"


def run(what: str) -> Any:
    """The JSON that tests.kernels.offline prints, from a process of its own without the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.offline", what], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def differences(recorded: str, compiled: str) -> list[str]:
    """Rows of one text that the other lacks: - recorded, + compiled."""
    lines = difflib.unified_diff(recorded.splitlines(), compiled.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


# one test, since it takes minutes: with several workers each would compile for itself
def test_every_kernel_compiles_for_every_class_of_gpu_within_its_registers_and_as_recorded() -> None:
    found = run("compile")
    assert {u["arch"] for u in found["rows"]} == {f"sm_{capability}" for capability in GPUS}
    for u in found["rows"]:
        # 255 registers a thread are all there are; up to rank 64 at least two programs fit a multiprocessor
        assert u["registers"] <= 255, u
        assert "rank 256" in u["case"] or u["registers"] * 32 * u["warps"] <= 65536 // 2, u
        assert u["spills"] == 0, u
        assert u["shared_bytes"] <= GPUS[int(u["arch"].removeprefix("sm_"))][1] * 1024, u
    places = [tuple(u[c] for c in ("kernel", "case", "arch", "dtype")) for u in found["rows"]]
    assert len(set(places)) == len(places), "two rows of one kernel, case, architecture and dtype"
    recorded = RECORD.read_bytes().decode()
    assert recorded == found["csv"], "\n".join(
        (
            f"{RECORD.relative_to(ROOT)} (-) is not what Triton {found['triton']} compiled (+).",
            f"Where that is meant, `{REWRITE}` rewrites it.",
            *differences(recorded, found["csv"]),
        )
    )


def test_every_kernel_that_a_launcher_launches_is_compiled() -> None:
    found = run("kernels")
    assert len(found["launched"]) >= 16
    assert found["matrix"] == found["launched"], "cases() in tests/kernels/offline.py must launch every kernel of ops"


def test_few_variants_serve_every_batch_size() -> None:
    for kernel, count in run("variants").items():
        assert count <= (1 if kernel.startswith("work list") else 12), (kernel, count)


def test_a_count_of_one_may_be_a_constant() -> None:
    assert run("alone") == ["expand.expand_kernel", "expand_topk_sum.expand_topk_sum_kernel", "shrink.shrink_kernel"]


def test_specialised_kernels_have_more_variants() -> None:
    plain, specialised = run("variants"), run("specialized")
    assert plain.keys() == specialised.keys()
    # those of the lists have no configuration that could switch it on
    switched = [kernel for kernel in plain if not kernel.startswith(("work list", "expert order"))]
    assert len(switched) >= 15
    for kernel in switched:
        assert specialised[kernel] > plain[kernel], kernel
