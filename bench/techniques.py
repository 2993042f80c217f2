"""What each technique of the kernels is worth: a layer's LoRA work with it switched, against the defaults in one run.

python -m bench.techniques [--kind moe dense] [--shapes gpt-oss-20b] [--m 1 16 64 ...] [--adapters 8] [--ranks 32]

Every technique is checked against float64 like the defaults; one that is off by 5e-3 gets no ratio. Rows go to
bench/results/techniques.csv; one is a field of ShrinkConfig or ExpandConfig, or the grouping of the rows.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import cases
from bench.csv_rows import append
from bench.kernels import COLUMNS, LIMIT, SLOTS, Result, dense_layers, in_turn, moe_layers, revision, rows
from lorahost_kernels.configs import ExpandConfig, ShrinkConfig, default_block_m
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.common.defaults import default_expand, default_shrink
from lorahost_kernels.ops.common.routing import Routing
from lorahost_kernels.ops.layer import Configs
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tuned import legal

SHARED_LIMIT = 227 * 1024  # bytes that one program may have on an H200
AS_USUAL = -1  # the default grouping
Product = Callable[..., None]


def usual(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs | None:
    """The defaults."""
    return shrink, expand


@dataclass(frozen=True)
class Technique:
    """One change of the defaults.

    change: the tiles instead of the default ones, None where it says nothing of them; block_m: rows a tile of the work
    list, None for no list.
    """

    name: str
    change: Callable[[ShrinkConfig, ExpandConfig], Configs | None] = usual
    block_m: int | None = AS_USUAL

    def routing(self, layer: cases.Layer, groups: int) -> Callable[[], Routing]:
        """Groups the rows as this technique does; groups: (slot, expert) pairs."""
        slots, _, rank, _ = layer.lora_a[0].shape
        pairs = layer.routing.num_pairs
        block_m = default_block_m(pairs, groups, rank) if self.block_m == AS_USUAL else self.block_m
        return lambda: layer.routing if block_m is None else build_work_list(layer.routing, slots, block_m)

    def product(self, op: Product, layer: cases.Layer, routing: Routing) -> Callable[[Routing], None] | None:
        """A call of one product in place; None where the technique changes nothing or can't run.

        routing: one like those of the calls.
        """
        shrink, expand = default_shrink(routing, layer.lora_a), default_expand(routing, layer.lora_b)
        configs = self.change(shrink, expand)
        block_m = None if routing.work is None else routing.work.block_m
        if configs is None or any(legal.problem(c, layer.lora_a[0].shape[2], block_m, SHARED_LIMIT) for c in configs):
            return None
        return lambda now: op(layer.y, layer.x, layer.lora_a, layer.lora_b, now, configs=configs)


def both(**fields: Any) -> Callable[[ShrinkConfig, ExpandConfig], Configs]:
    """Fields that shrink and expand have in common."""
    return lambda shrink, expand: (replace(shrink, **fields), replace(expand, **fields))


def prefetch(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs | None:
    """B is asked for before the wait."""
    return (shrink, replace(expand, prefetch=True)) if expand.mode == "list" else None


def split(parts: int, atomic: bool = False) -> Callable[[ShrinkConfig, ExpandConfig], Configs | None]:
    """K in so many parts, stored side by side or added with relaxed atomics."""

    def change(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs | None:
        new = replace(shrink, split_k=parts, atomic=atomic)
        return (new, expand) if new != shrink else None

    return change


def ranks(count: int) -> Callable[[ShrinkConfig, ExpandConfig], Configs | None]:
    """So many ranks a program of a shrink by pairs."""

    def change(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs | None:
        return (replace(shrink, ranks=count), expand) if shrink.mode == "pair" and shrink.ranks != count else None

    return change


def add_apart(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs:
    """The product goes to a buffer of zeros, which is added in a launch of its own."""
    return shrink, replace(expand, fused_add=False)


def turns(shrink: ShrinkConfig, expand: ExpandConfig) -> Configs:
    """Eight tiles take turns on one chunk of B."""
    return shrink, replace(expand, group=8)


TECHNIQUES = (
    Technique("defaults"),
    Technique("without programmatic dependent launch", both(pdl=False)),
    Technique("masks where blocks divide", both(masks=True)),
    Technique("counts and alignments specialised", both(specialize=True)),
    Technique("prefetch of B before the wait", prefetch),
    Technique("split_k 1", split(1)),
    Technique("split_k 2", split(2)),
    Technique("split_k 4", split(4)),
    Technique("split_k 2, atomics", split(2, atomic=True)),
    Technique("ranks 1", ranks(1)),
    Technique("ranks 4", ranks(4)),
    Technique("group 8", turns),
    Technique("add in a launch of its own", add_apart),
    Technique("no work list", block_m=None),
    *(Technique(f"work list of {rows} rows", block_m=rows) for rows in legal.BLOCK_MS),
)


def moe_call(technique: Technique, gate_up: cases.Layer, down: cases.Layer) -> Callable[[], None] | None:
    """gate_up, then down, grouping of the rows included; None where the technique changes nothing there."""
    group = technique.routing(gate_up, gate_up.lora_a[0].shape[0] * gate_up.routing.num_experts)
    like = group()
    products = [technique.product(op, one, like) for op, one in ((ops.gate_up, gate_up), (ops.down, down))]
    return _chained(group, products)


def dense_call(technique: Technique, modules: Sequence[cases.Layer]) -> Callable[[], None] | None:
    """Every linear layer of a block; the rows are grouped before, once a step."""
    like = technique.routing(modules[0], modules[0].lora_a[0].shape[0])()
    return _chained(lambda: like, [technique.product(ops.linear, module, like) for module in modules])


def _chained(
    group: Callable[[], Routing], products: Sequence[Callable[[Routing], None] | None]
) -> Callable[[], None] | None:
    found = [product for product in products if product]
    if len(found) < len(products):
        return None

    def call() -> None:
        routing = group()
        for product in found:
            product(routing)

    return call


def moe_results(name: str, tokens: int, adapters: int, rank: int) -> list[tuple[Technique, Result]]:
    """All techniques that change something, the defaults first."""
    layers = moe_layers(replace(cases.MOE[name], rank=rank), tokens, adapters)
    checked = [(layers[0][0], False), (layers[0][1], True)]
    calls = ((t, [moe_call(t, *pair) for pair in layers]) for t in TECHNIQUES)
    able = [(t, [c for c in found if c]) for t, found in calls if all(found)]
    return list(zip((t for t, _ in able), in_turn([found for _, found in able], checked), strict=True))


def dense_results(name: str, tokens: int, adapters: int, rank: int) -> list[tuple[Technique, Result]]:
    """See `moe_results`."""
    layers = dense_layers(replace(cases.DENSE[name], rank=rank), tokens, adapters)
    checked = [(module, True) for module in layers[0]]
    calls = ((t, [dense_call(t, modules) for modules in layers]) for t in TECHNIQUES)
    able = [(t, [c for c in found if c]) for t, found in calls if all(found)]
    return list(zip((t for t, _ in able), in_turn([found for _, found in able], checked), strict=True))


def line(technique: Technique, result: Result, defaults: Result) -> str:
    """One printed row; the ratio to the defaults only where the error is under the limit."""
    if result.time is None or defaults.time is None:
        return f"  {technique.name:<40} {result.problem}"
    time = f"{result.time.p50:9.1f} us ({result.time.p20:.1f}-{result.time.p80:.1f})"
    ratio = f"{result.time.p50 / defaults.time.p50:.3f} of the defaults" if result.error < LIMIT else "RED"
    return f"  {technique.name:<40} {time}  err {result.error:.1e}  {ratio}"


def main() -> int:
    """Prints the tables; 1 if any result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", default=["moe", "dense"], choices=["moe", "dense"])
    parser.add_argument("--shapes", nargs="+", default=["gpt-oss-20b"])
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 64, 256, 1600, 8192])
    parser.add_argument("--adapters", nargs="+", type=int, default=[8])
    parser.add_argument("--ranks", nargs="+", type=int, default=[32])
    parser.add_argument("--csv", type=Path, default=Path("bench/results/techniques.csv"))
    parser.add_argument("--rev", default=revision(), help="commit that is measured, where there is no checkout")
    args = parser.parse_args()
    run = {"moe": moe_results, "dense": dense_results}
    known = {"moe": cases.MOE, "dense": cases.DENSE}
    points = [
        (kind, name, m, n, rank)
        for kind in args.kind
        for name in args.shapes
        if name in known[kind]
        for m in args.m
        for n in args.adapters
        for rank in args.ranks
    ]
    red = 0
    for kind, name, tokens, adapters, rank in points:
        found = run[kind](name, tokens, adapters, rank)
        print(f"{kind} {name} M={tokens} adapters={adapters} rank={rank}", flush=True)
        for technique, result in found:
            red += not result.error < LIMIT
            print(line(technique, result, found[0][1]), flush=True)
        config = f"{name} rank={rank} slots={SLOTS} adapters={adapters} bf16"
        results = [result for _, result in found]
        append(args.csv, COLUMNS, rows(kind, tokens, config, args.rev, results, [t.name for t, _ in found]))
        gc.collect()
        torch.cuda.empty_cache()
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
