"""Compiles kernels for a GPU that is not there: what the launchers would pass, turned into Triton's source object."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of a kernel; spills in bytes."""

    registers: int
    spills: int
    shared: int
    asm: dict[str, Any]


class Recorder:
    """Stands in for a kernel: keeps the arguments of its launch instead of launching."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **kwargs: self.calls.append(kwargs)


def source(kernel: Any, arguments: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """(source, options) as the just-in-time compiler specialises them: div16, ==1 and constexpr arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, p in enumerate(kernel.params):
        value = arguments[p.name]
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = POINTERS[value.dtype]
            if not p.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif value == 1 and not p.do_not_specialize:
            signature[p.name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not p.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), {k: arguments[k] for k in OPTIONS if k in arguments}


def compile_for(kernel: Any, arguments: dict[str, Any], capability: int) -> Usage:
    """Compiles down to a cubin for sm_<capability> and reads its resource usage."""
    src, options = source(kernel, arguments)
    compiled = triton.compile(src, target=GPUTarget("cuda", capability, 32), options=options)
    return Usage(*resources(compiled.asm["cubin"]), compiled.metadata.shared, compiled.asm)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, local-memory bytes) by the cuobjdump that Triton carries."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", out)
    if not found:
        raise RuntimeError(f"no resource usage in {out!r}")
    return int(found[1]), int(found[2]) + int(found[3])
