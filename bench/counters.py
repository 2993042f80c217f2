"""Runs each operation of a layer once more after a warm-up, for a profiler of hardware counters to look at.

ncu --clock-control none --profile-from-start off --csv --metrics METRICS python -m bench.counters [--m 16 256 8192]

METRICS is printed by --metrics. GPT-OSS-20B shapes, 8 adapters, rank 32: the experts, with the expands that take over
the step behind them, and the dense layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from bench import cases
from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer
from lorahost_kernels.ops.work_list.launch import build_work_list

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
SLOTS = 8
DEVICE = torch.device("cuda")


def experts(tokens: int) -> Callable[[], None]:
    """One MoE layer as the engine runs it, and once more with the expands that add in place."""
    shape = cases.MOE["gpt-oss-20b"]
    gate_up, down = cases.moe_layer(shape, tokens, SLOTS, SLOTS, DEVICE, torch.bfloat16)
    block_m = work_block_m(gate_up.routing.num_pairs, SLOTS * shape.experts, shape.rank)
    routing = gate_up.routing if block_m is None else build_work_list(gate_up.routing, SLOTS, block_m)
    rows = torch.arange(routing.num_pairs, device=DEVICE, dtype=torch.int32)
    ordered = replace(routing, pair_rows=rows)
    activated = torch.empty(routing.num_pairs, shape.intermediate, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16)

    def run() -> None:
        layer.gate_up(gate_up.y, gate_up.x, gate_up.lora_a, gate_up.lora_b, routing)
        layer.down(down.y, down.x, down.lora_a, down.lora_b, routing)
        y = gate_up.y.view(routing.num_pairs, -1)
        layer.gate_up_swiglu(activated, y, gate_up.x, gate_up.lora_a[0], gate_up.lora_b[0], ordered, 1.702, 7.0)
        if block_m is None:
            layer.down_topk_sum(out, down.y, down.x, down.lora_a[0], down.lora_b[0], ordered)

    return run


def linears(tokens: int) -> Callable[[], None]:
    """qkv and o of one layer, on lists that are built before."""
    shape = cases.DENSE["gpt-oss-20b"]
    modules = [
        cases.dense_layer(k, widths, shape.rank, tokens, SLOTS, SLOTS, DEVICE, torch.bfloat16)
        for k, widths in shape.modules.values()
    ]
    block_m = work_block_m(tokens, SLOTS, shape.rank)
    routings = [m.routing if block_m is None else build_work_list(m.routing, SLOTS, block_m) for m in modules]

    def run() -> None:
        for m, routing in zip(modules, routings, strict=True):
            layer.linear(m.y, m.x, m.lora_a, m.lora_b, routing)

    return run


def profiled(run: Callable[[], None]) -> None:
    """Once to compile, once for the profiler."""
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", nargs="+", type=int, default=[16, 256, 8192])
    parser.add_argument("--metrics", action="store_true", help="print the counters' names and end")
    args = parser.parse_args()
    if args.metrics:
        print(",".join(METRICS))
        return 0
    for tokens in args.m:
        profiled(experts(tokens))
        profiled(linears(tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
