"""What a linear layer costs that no resident adapter touches: launched, and left out of the CUDA graph's replays.

python -m bench.untouched [--m 1 16 ...] [--adapters 8]

Each graph has LAYERS times a base product, the LoRA launches on its output and another base product. Their time above
that of the same graph without LoRA launches is the cost. What a graph pays that others were taken out of shows beside a
graph of the same launches: "touched" and "touched, beside one skipped". Rows go to bench/results/untouched.csv. The
outputs are checked: with an adapter against float64, without one they are the base product's, bit for bit.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import linear

from bench import cases
from bench.csv_rows import append
from bench.kernels import COLUMNS, DEVICE, DTYPE, LIMIT, SLOTS, TURNS, Result, reference, revision, rows
from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tune.timing import Spread, capture, relative_error, replay_us, spread
from lorahost_kernels.vllm_026 import graph_nodes

LAYERS = 24
REPLAYS = 30
RANK = 32
# of GPT-OSS-20B: (in, out of each slice), and the columns of the base product behind it
MODULES = {"router": (2880, (32,), 5120), "qkv": (2880, (4096, 512, 512), 4096), "o": (4096, (2880,), 5120)}
LAUNCHED, SKIPPED, BESIDE = "untouched, launched", "untouched, skipped", "touched, beside one skipped"
STATES = ("no LoRA", "touched", BESIDE, LAUNCHED, SKIPPED)


@dataclass
class Block:
    """One layer of the graph."""

    layer: cases.Layer
    weight: torch.Tensor
    behind: torch.Tensor

    def call(self, lora: Callable[[], object] | None) -> None:
        torch.mm(self.layer.x, self.weight, out=self.layer.y)
        if lora:
            lora()
        linear(self.layer.x, self.behind)


def blocks_of(name: str, tokens: int, adapters: int) -> list[Block]:
    """LAYERS layers with weights of their own, whose rows are grouped as an engine does: once a step."""
    k, outs, width = MODULES[name]
    found = []
    for _ in range(LAYERS):
        layer = cases.dense_layer(k, outs, RANK, tokens, SLOTS, adapters, DEVICE, DTYPE)
        block_m = work_block_m(tokens, SLOTS, RANK)
        if block_m is not None:
            layer = replace(layer, routing=build_work_list(layer.routing, SLOTS, block_m))
        weight = torch.randn(k, sum(outs), device=DEVICE, dtype=DTYPE) * k**-0.5
        behind = torch.randn(width, k, device=DEVICE, dtype=DTYPE) * k**-0.5
        found.append(Block(layer, weight, behind))
    return found


def graph_of(state: str, blocks: list[Block]) -> torch.cuda.CUDAGraph:
    """The graph of one state, as it is replayed from here on."""
    enable(blocks, state)
    graph_nodes.set_touched(frozenset({1, 2}), frozenset({1}))

    def lora(layer: cases.Layer) -> None:
        launch = partial(ops.linear, layer.y, layer.x, layer.lora_a, layer.lora_b, layer.routing)
        graph_nodes.run_for(2 if state == SKIPPED else 1, launch)
        if state == BESIDE:
            graph_nodes.run_for(2, launch)

    return capture([partial(b.call, partial(lora, b.layer) if state != "no LoRA" else None) for b in blocks])


def enable(blocks: list[Block], state: str) -> None:
    """Lets the adapters have weights in the layers, or none."""
    for block in blocks:
        block.layer.routing.adapter_enabled.fill_(int(state.startswith("touched")))


def error_of(state: str, graph: torch.cuda.CUDAGraph, block: Block) -> float:
    """Relative error of one layer's output; infinite where a row changed that should not."""
    layer = block.layer
    enable([block], state)
    graph.replay()
    got = layer.y.clone()
    torch.mm(layer.x, block.weight, out=layer.y)
    if state.startswith("touched"):
        return relative_error(got, reference(layer, True))
    return 0.0 if torch.equal(got, layer.y) else float("inf")


def measure(name: str, tokens: int, adapters: int) -> list[Result]:
    """One result for each of STATES, timed in turns; microseconds a layer."""
    blocks = blocks_of(name, tokens, adapters)
    graphs = {state: graph_of(state, blocks) for state in STATES}
    errors = {state: error_of(state, graph, blocks[0]) for state, graph in graphs.items()}
    times: dict[str, list[Spread]] = {state: [] for state in STATES}
    for _ in range(TURNS):
        for state, graph in graphs.items():
            enable(blocks, state)
            for _ in range(3):
                graph.replay()
            times[state].append(spread(replay_us(graph, REPLAYS), LAYERS))
    built = graph_nodes.report()
    print(f"{name} M={tokens}: {built['builds']} builds of graphs of {LAYERS} layers, {built['build_ms']} ms")
    middle = {state: sorted(found, key=lambda t: t.p50)[len(found) // 2] for state, found in times.items()}
    return [Result(middle[state], errors[state]) for state in STATES]


def line(label: str, results: list[Result]) -> str:
    """One printed row: what each state costs above no LoRA; no number where an output is wrong."""
    if not all(r.error < LIMIT for r in results):
        return f"{label:<28} RED: errors {[r.error for r in results]}"
    base, *rest = [r.time.p50 for r in results if r.time]
    costs = ", ".join(f"{state} {time - base:+.2f}" for state, time in zip(STATES[1:], rest, strict=True))
    return f"{label:<28} {base:7.2f} us without LoRA; {costs}"


def main() -> int:
    """Prints the table; 1 if an output is wrong, 2 where launches can't be left out of graphs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1600])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--csv", type=Path, default=Path("bench/results/untouched.csv"))
    parser.add_argument("--rev", default=revision(), help="commit that is measured, where there is no checkout")
    args = parser.parse_args()
    if problem := graph_nodes.start():
        print(problem, file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__, args.rev)
    red, saved = 0, []
    for name in MODULES:
        for tokens in args.m:
            results = measure(name, tokens, args.adapters)
            right = all(r.error < LIMIT for r in results)
            red += not right
            print(line(f"{name} M={tokens}", results), flush=True)
            times = {state: r.time.p50 for state, r in zip(STATES, results, strict=True) if r.time}
            saved += [times[LAUNCHED] - times[SKIPPED]] if right else []
            config = f"gpt-oss-20b rank={RANK} slots={SLOTS} adapters={args.adapters} layers={LAYERS} bf16"
            append(args.csv, COLUMNS, rows(name, tokens, config, args.rev, results, STATES))
            gc.collect()
            torch.cuda.empty_cache()
    if saved:
        print(f"median saved by leaving them out: {median(saved):.2f} us a module")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
