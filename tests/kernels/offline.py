"""Compiles what the launchers would launch for GPUs that are not there, and counts compiled variants.

Run as a program (the test process may have Triton's interpreter on): `compile`, `kernels`, `variants`, `specialized`
and `alone` print one JSON document, `record` rewrites bench/results/registers.csv.
"""

import concurrent.futures
import csv
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from tests.kernels.offline_launches import GPUS, SHAPES, Call, launched, launches, name_of
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorahost_kernels.ops.common import replay

RECORD = Path(__file__).parents[2] / "bench/results/registers.csv"
COLUMNS = ("kernel", "case", "arch", "dtype", "registers", "spills", "shared_bytes")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
OPTIONS = ("num_warps", "launch_pdl")


@dataclass(frozen=True)
class Case:
    """One product at one batch size, to be compiled for sm_<capability>."""

    product: str
    tokens: int
    capability: int
    dtype: torch.dtype = torch.bfloat16


def source(call: Call) -> ASTSource:
    """What the just-in-time compiler would make of the launch: div16, ==1 and constexpr arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, p in enumerate(call.kernel.params):
        value = call.arguments[p.name]
        if p.is_constexpr:
            signature[p.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[p.name] = "*" + DTYPES[value.dtype]
            if not p.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        elif value == 1 and not p.do_not_specialize:
            signature[p.name], constants[(i,)] = "constexpr", 1
        else:
            signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not p.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(call.kernel, signature, constants, attributes)


def variant(call: Call) -> str:
    """Two launches with the same text share one compiled kernel."""
    s = source(call)
    options = {k: call.arguments.get(k) for k in OPTIONS}
    return repr((s.signature, sorted(s.constants.items()), sorted(s.attrs.items()), options))


def usage(call: Call, capability: int) -> dict[str, int]:
    """Warps, registers, bytes of local memory (spills) and of shared memory on sm_<capability>."""
    options = {k: call.arguments[k] for k in OPTIONS if k in call.arguments}
    compiled = triton.compile(source(call), target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        out = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", out)
    if not found:
        raise RuntimeError(f"no resource usage in {out!r}")
    return {
        "warps": call.arguments.get("num_warps", 4),
        "registers": int(found[1]),
        "spills": int(found[2]) + int(found[3]),
        "shared_bytes": compiled.metadata.shared,
    }


def cases() -> Iterator[Case]:
    """Every kernel at a decode and at prefill batch sizes, for each of GPUS."""
    for capability in GPUS:
        for product in [name for name in SHAPES if not name.startswith(("swiglu", "topk"))]:
            for tokens in (16, 1600, 8192) if capability == 90 else (16, 8192):
                yield Case(product, tokens, capability)
        for tokens in (16, 256, 1600, 8192):
            yield Case("swiglu rank 32", tokens, capability)
        # expert order: one launch for few pairs, three for many
        for product, tokens in (("swiglu rank 256", 8192), ("topk sum", 16), ("work list", 1600),
                                ("expert order", 16), ("expert order", 1600)):  # fmt: skip
            yield Case(product, tokens, capability)
    for product in ("gpt-oss-20b gate_up", "gpt-oss-20b down", "gpt-oss-20b qkv", "swiglu rank 32"):
        yield Case(product, 1600, 90, torch.float16)
    for product in ("swiglu rank 32", "topk sum"):
        yield Case(product, 16, 90, torch.float16)


def compile_case(case: Case) -> list[dict[str, int | str]]:
    """Usage of each launch of a case."""
    dtype = "" if case.product == "work list" else DTYPES[case.dtype]
    place = {"case": f"{case.product} {case.tokens} tokens", "arch": f"sm_{case.capability}", "dtype": dtype}
    calls = launches(case.product, case.tokens, case.dtype, case.capability)
    return [{"kernel": name_of(call.kernel), **place, **usage(call, case.capability)} for call in calls]


def compiled() -> list[dict[str, int | str]]:
    """Usage of all cases, sorted by the record's columns."""
    jobs, spawn = min(8, len(os.sched_getaffinity(0))), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        found = [row for rows in pool.map(compile_case, cases()) for row in rows]
    return sorted(found, key=lambda row: [str(row[c]) for c in COLUMNS])


def alone() -> list[str]:
    """Names of the kernels that were compiled for one token with its count specialised to a constant."""
    calls = [call for product in ("gpt-oss-20b qkv", "topk sum") for call in launches(product, 1)]
    calls = [Call(replay.specialized(call.kernel), call.arguments) for call in calls]
    constant = [c for c in calls if any(not c.kernel.params[i].is_constexpr for (i,) in source(c).constants)]
    for call in constant:
        usage(call, 90)
    return sorted(name_of(call.kernel) for call in constant)


def as_csv(rows: list[dict[str, int | str]]) -> str:
    """The text of the record."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def variants(specialize: bool = False) -> dict[str, int]:
    """Compiled variants of each kernel of each product over all batch sizes from 1 to 16384.

    specialize: as `ShrinkConfig.specialize`, for all launches.
    """
    sizes = [*range(1, 300), *range(300, 16384, 37), 16384]
    found: dict[str, set[str]] = {}
    for product in (*SHAPES, "work list", "expert order"):
        for tokens in sizes:
            for call in launches(product, tokens):
                if specialize:
                    call = Call(replay.specialized(call.kernel), call.arguments)
                found.setdefault(f"{product} {name_of(call.kernel)}", set()).add(variant(call))
    return {k: len(v) for k, v in found.items()}


def main(what: str) -> None:
    if what == "record":
        RECORD.write_bytes(as_csv(compiled()).encode())
    elif what == "compile":
        rows = compiled()
        print(json.dumps({"rows": rows, "csv": as_csv(rows), "triton": triton.__version__}))
    elif what == "kernels":
        matrix = {name_of(call.kernel) for case in cases() for call in launches(case.product, case.tokens)}
        print(json.dumps({"launched": sorted(launched()), "matrix": sorted(matrix)}))
    elif what == "alone":
        print(json.dumps(alone()))
    else:
        print(json.dumps(variants(what == "specialized")))


if __name__ == "__main__":
    main(sys.argv[1])
