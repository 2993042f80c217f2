"""Compiles what the launchers would launch for GPUs that are not there, and counts compiled variants.

Run as a program (the test process may have Triton's interpreter on): `compile`, `kernels`, `variants`, `specialized`
and `alone` print one JSON document, `record` rewrites bench/results/registers.csv.
"""

import concurrent.futures
import csv
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from lorahost_kernels import ops
from lorahost_kernels.configs import next_pow2, work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.common import replay
from lorahost_kernels.ops.common.routing import Routing, WorkList
from lorahost_kernels.ops.expert_order.launch import expert_order
from lorahost_kernels.ops.work_list.launch import build_work_list

RECORD = Path(__file__).parents[2] / "bench/results/registers.csv"
COLUMNS = ("kernel", "case", "arch", "dtype", "registers", "spills", "shared_bytes")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
OPTIONS = ("num_warps", "launch_pdl")
SLOTS = 8
# name -> (product of ops.layer, experts, topk, in, out of each slice, rank); experts None: a dense layer
SHAPES: dict[str, tuple[str, int | None, int, int, tuple[int, ...], int]] = {
    "gpt-oss-20b gate_up": ("gate_up", 32, 4, 2880, (5760,), 32),
    "gpt-oss-20b down": ("down", 32, 4, 2880, (2880,), 32),
    "qwen3-30b gate_up": ("gate_up", 128, 8, 2048, (768, 768), 32),
    "gpt-oss-20b qkv": ("linear", None, 1, 2880, (4096, 512, 512), 32),
    "mixtral gate_up rank 256": ("gate_up", 8, 2, 4096, (14336, 14336), 256),
    "swiglu rank 32": ("gate_up_swiglu", 32, 4, 2880, (5760,), 32),
    "swiglu rank 256": ("gate_up_swiglu", 32, 4, 2880, (5760,), 256),
    "topk sum": ("down_topk_sum", 32, 4, 2880, (2880,), 32),
}


@dataclass(frozen=True)
class Case:
    """One product at one batch size, to be compiled for sm_<capability>."""

    product: str
    tokens: int
    capability: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Call:
    """One launch that was recorded instead of made."""

    kernel: Any
    arguments: dict[str, Any]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(product: Callable[[], object]) -> list[Call]:
    """What a product launches."""
    calls: list[Call] = []

    def record(kernel: Any, key: Any, pointers: tuple[Tensor, ...], constants: Callable[[], Any]) -> None:
        _, args, options, specialize = constants()
        kernel = replay.specialized(kernel) if specialize else kernel
        calls.append(Call(kernel, {**dict(zip(kernel.arg_names, pointers, strict=False)), **args, **options}))

    with mock.patch.object(replay, "launch", record):
        product()
    return calls


def launches(product: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Call]:
    """The launches of one product with the default tiles."""
    ids, gates = meta(tokens, 4, dtype=torch.int32), meta(tokens, 4, dtype=torch.float32)
    if product == "work list":
        routing = Routing(ids[:, 0], meta(SLOTS + 1, dtype=torch.int32), 32, ids)
        return recorded(lambda: build_work_list(routing, SLOTS, 32))
    if product == "expert order":
        # the tile height of the base GEMM, as vllm_026.oai_experts picks it
        block_m = max(16, min(next_pow2(max(1, tokens * 4 // 32)), 128))
        return recorded(lambda: expert_order(ids, gates, 32, block_m, dtype))
    return layer_launches(product, tokens, dtype)


def layer_launches(name: str, tokens: int, dtype: torch.dtype) -> list[Call]:
    """The launches of one layer; none where the engine runs another product.

    Of products whose expand takes over the step behind it that expand alone: their shrinks are those of the others.
    """
    product, experts, topk, k, widths, rank = SHAPES[name]
    pairs, fused = tokens * topk, product in ("gate_up_swiglu", "down_topk_sum")
    block_m = work_block_m(pairs, SLOTS * (experts or 1), rank)
    if product == "down_topk_sum" and block_m is not None:
        return []
    index: dict[str, Any] = {"dtype": torch.int32}
    routing = Routing(
        meta(tokens, **index), meta(SLOTS + 1, **index), experts or 1,
        meta(tokens, topk, **index) if experts else None,
        meta(tokens, topk, dtype=torch.float32) if experts else None,
        meta(pairs, **index) if fused else None,
        None if block_m is None else WorkList(meta(pairs, **index), meta(1, **index), 100, block_m),
    )  # fmt: skip
    a = [meta(SLOTS, experts or 1, rank, k, dtype=dtype) for _ in widths]
    b = [meta(SLOTS, experts or 1, n, rank, dtype=dtype) for n in widths]
    n = sum(widths)
    x = meta(pairs if product.startswith("down") else tokens, k, dtype=dtype)
    y = meta(tokens, topk, n, dtype=dtype) if experts else meta(tokens, n, dtype=dtype)
    if product == "gate_up_swiglu":
        out, rows = meta(pairs, n // 2, dtype=dtype), y.view(pairs, n)
        return recorded(lambda: layer.gate_up_swiglu(out, rows, x, a[0], b[0], routing, 1.702, 7.0))[1:]
    if product == "down_topk_sum":
        out = meta(tokens, n, dtype=dtype)
        return recorded(lambda: layer.down_topk_sum(out, y, x, a[0], b[0], routing))[1:]
    return recorded(lambda: getattr(layer, product)(y, x, a, b, routing))


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


def name_of(kernel: Any) -> str:
    """operation.function: two operations have a count_kernel."""
    return f"{kernel.__module__.split('.')[-2]}.{kernel.__name__}"


def usage(call: Call, capability: int) -> dict[str, int]:
    """Warps, registers, bytes of local memory (spills) and of shared memory on sm_<capability>."""
    options = {k: call.arguments[k] for k in OPTIONS if k in call.arguments}
    if capability < 90:
        options["launch_pdl"] = False
        call = Call(call.kernel, {**call.arguments, "PDL": False})
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
    """Every kernel at a decode and at prefill batch sizes, for three generations of GPUs."""
    for capability in (80, 90, 100):
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
    calls = launches(case.product, case.tokens, case.dtype)
    return [{"kernel": name_of(call.kernel), **place, **usage(call, case.capability)} for call in calls]


def compiled() -> list[dict[str, int | str]]:
    """Usage of all cases, sorted by the record's columns."""
    jobs, spawn = min(8, len(os.sched_getaffinity(0))), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn, initializer=pretend_pdl) as pool:
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


def modules() -> list[ModuleType]:
    """All modules of lorahost_kernels.ops."""
    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]


def named(code: CodeType) -> set[str]:
    """The names that a function's code and the functions in it read."""
    return {*code.co_names}.union(*(named(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def launched() -> set[str]:
    """The kernels that launchers launch: those that no kernel calls, and those that a plain function names."""
    here = [v for m in modules() for v in vars(m).values() if getattr(v, "__module__", None) == m.__name__]
    kernels = {v for v in here if isinstance(v, JITFunction)}

    def used_by(functions: Iterable[FunctionType]) -> set[Any]:
        found = [f.__globals__.get(name) for f in functions for name in named(f.__code__)]
        return {v for v in found if isinstance(v, JITFunction)}

    called = used_by(kernel.fn for kernel in kernels)
    by_launchers = used_by(v for v in here if isinstance(v, FunctionType))
    return {name_of(kernel) for kernel in (kernels - called) | by_launchers}


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


def pretend_pdl() -> None:
    """Makes launchers choose what they choose on a GPU with programmatic dependent launch."""
    for module in [m for m in modules() if hasattr(m, "has_pdl")]:
        module.has_pdl = lambda device: True  # type: ignore[attr-defined]


def main(what: str) -> None:
    pretend_pdl()
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
