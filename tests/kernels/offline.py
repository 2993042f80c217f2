"""Compiles what the launchers would launch for GPUs that are not there, and counts compiled variants.

Run as a program (the test process may have Triton's interpreter on): prints one JSON document.
"""

import importlib
import json
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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorahost_kernels.configs import shrink_config, work_block_m
from lorahost_kernels.ops.common import launch
from lorahost_kernels.ops.common.routing import Routing, WorkList, slice_columns, unweighted
from lorahost_kernels.ops.expand_swiglu import launch as expand_swiglu_launch
from lorahost_kernels.ops.work_list import launch as work_list_launch

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
OPTIONS = ("num_warps", "launch_pdl")
SLOTS = 8
# name -> (experts, topk, in, out of each slice, rank); experts None: a dense layer
SHAPES: dict[str, tuple[int | None, int, int, tuple[int, ...], int]] = {
    "gpt-oss-20b gate_up": (32, 4, 2880, (5760,), 32),
    "gpt-oss-20b down": (32, 4, 2880, (2880,), 32),
    "qwen3-30b gate_up": (128, 8, 2048, (768, 768), 32),
    "gpt-oss-20b qkv": (None, 1, 2880, (4096, 512, 512), 32),
    "mixtral gate_up rank 256": (8, 2, 4096, (14336, 14336), 256),
}


@dataclass(frozen=True)
class Call:
    """One launch that was recorded instead of made."""

    kernel: Any
    arguments: dict[str, Any]


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, calls: list[Call]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **kwargs: Any) -> None:
            named = dict(zip([p.name for p in self.kernel.params], args, strict=False))
            self.calls.append(Call(self.kernel, {**named, **kwargs}))

        return record


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_of(op: str) -> Any:
    """The compiled-on-demand function of an operation."""
    return getattr(importlib.import_module(f"lorahost_kernels.ops.{op}.kernel"), f"{op}_kernel")


def launches(name: str, tokens: int) -> list[Call]:
    """The shrink and expand launches of one layer with the default tiles."""
    experts, topk, k, widths, rank = SHAPES[name]
    pairs, groups = tokens * topk, SLOTS * (experts or 1)
    block_m = work_block_m(pairs, groups, rank)
    index = {"dtype": torch.int32}
    work = None if block_m is None else WorkList(meta(pairs, **index), meta(1, **index), 100, block_m)
    routing = Routing(
        meta(tokens, **index),
        meta(SLOTS + 1, **index),
        experts or 1,
        meta(tokens, topk, **index) if experts else None,
        meta(tokens, topk, dtype=torch.float32) if experts else None,
        work=work,
    )
    down = name.endswith("down")
    a = [meta(SLOTS, experts or 1, rank, k) for _ in widths]
    b = [meta(SLOTS, experts or 1, n, rank) for n in widths]
    prefix = "down_" if down else "gate_up_" if experts else ""
    calls: list[Call] = []
    shrink, expand = (Recorder(kernel_of(prefix + half), calls) for half in ("shrink", "expand"))
    x = meta(pairs if down else tokens, k)
    h = launch.run_shrink(shrink, f"{prefix}shrink", x, a, routing, down, None)
    y = meta(tokens, topk, sum(widths)) if experts else meta(tokens, sum(widths))
    weighted = routing if down else unweighted(routing)
    launch.run_expand(expand, f"{prefix}expand", y, h, b, weighted, slice_columns(b), True, None)
    return calls


def work_list_launches(tokens: int) -> list[Call]:
    """The launches that build a work list."""
    calls: list[Call] = []
    kernels = {n: getattr(work_list_launch, n) for n in ("count_kernel", "scan_kernel", "place_kernel")}
    for n, kernel in kernels.items():
        setattr(work_list_launch, n, Recorder(kernel, calls))
    ids = meta(tokens, 4, dtype=torch.int32)
    enabled = meta(SLOTS + 1, dtype=torch.int32)
    work_list_launch.build_work_list(Routing(ids[:, 0], enabled, 32, ids), SLOTS, 32)
    for n, kernel in kernels.items():
        setattr(work_list_launch, n, kernel)
    return calls


def swiglu_launches(tokens: int, rank: int) -> list[Call]:
    """The launch of expand_swiglu for GPT-OSS-20B, by pairs or by the default tiles as the batch wants it."""
    experts, topk, _, (width,), _ = SHAPES["gpt-oss-20b gate_up"]
    pairs, groups = tokens * topk, SLOTS * (experts or 1)
    block_m = work_block_m(pairs, groups, rank)
    index = {"dtype": torch.int32}
    work = None if block_m is None else WorkList(meta(pairs, **index), meta(1, **index), 100, block_m)
    splits = 1 if block_m is None else shrink_config(pairs, groups, rank, 2880, 1, block_m).split_k
    routing = Routing(
        meta(tokens, **index), meta(SLOTS + 1, **index), experts or 1, meta(tokens, topk, **index),
        pair_rows=meta(pairs, **index), work=work,
    )  # fmt: skip
    calls: list[Call] = []
    kernels = {n: getattr(expand_swiglu_launch, n) for n in ("expand_swiglu_kernel", "expand_swiglu_list_kernel")}
    for n, kernel in kernels.items():
        setattr(expand_swiglu_launch, n, Recorder(kernel, calls))
    h = meta(splits, pairs, 1, rank, dtype=torch.float32)
    b = meta(SLOTS, experts or 1, width, rank)
    expand_swiglu_launch.expand_swiglu(meta(pairs, width // 2), meta(pairs, width), h, b, routing, 1.702, 7.0)
    for n, kernel in kernels.items():
        setattr(expand_swiglu_launch, n, kernel)
    return calls


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
            signature[p.name] = POINTERS[value.dtype]
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


def usage(call: Call, capability: int) -> dict[str, int | str]:
    """Registers, bytes of local memory (spills) and of shared memory on sm_<capability>."""
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
        "kernel": call.kernel.__name__,
        "sm": capability,
        "warps": call.arguments.get("num_warps", 4),
        "registers": int(found[1]),
        "spilled": int(found[2]) + int(found[3]),
        "shared": compiled.metadata.shared,
    }


def compiled() -> Iterator[dict[str, int | str]]:
    """Usage of every kernel at a decode and at prefill batch sizes, for three generations of GPUs."""
    for capability in (80, 90, 100):
        for name in SHAPES:
            for tokens in (16, 1600, 8192) if capability == 90 else (16, 8192):
                for call in launches(name, tokens):
                    yield {"shape": name, "tokens": tokens, **usage(call, capability)}
        for tokens, rank in ((16, 32), (256, 32), (1600, 32), (8192, 32), (8192, 256)):
            for call in swiglu_launches(tokens, rank):
                yield {"shape": f"swiglu rank {rank}", "tokens": tokens, **usage(call, capability)}
        for call in work_list_launches(1600):
            yield {"shape": "work list", "tokens": 1600, **usage(call, capability)}


def variants() -> dict[str, int]:
    """Compiled variants of each kernel of each shape over all batch sizes from 1 to 16384."""
    sizes = [*range(1, 300), *range(300, 16384, 37), 16384]
    found: dict[str, set[str]] = {}
    for name in SHAPES:
        for tokens in sizes:
            for call in launches(name, tokens):
                found.setdefault(f"{name} {call.kernel.__name__}", set()).add(variant(call))
    for tokens in sizes:
        for call in swiglu_launches(tokens, 32):
            found.setdefault(f"swiglu {call.kernel.__name__}", set()).add(variant(call))
        for call in work_list_launches(tokens):
            found.setdefault(f"work list {call.kernel.__name__}", set()).add(variant(call))
    return {k: len(v) for k, v in found.items()}


if __name__ == "__main__":
    launch.has_pdl = lambda device: True  # type: ignore[assignment]
    work_list_launch.has_pdl = launch.has_pdl
    expand_swiglu_launch.has_pdl = launch.has_pdl
    print(json.dumps(list(compiled()) if sys.argv[1] == "compile" else variants()))
