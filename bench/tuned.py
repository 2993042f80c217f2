"""Tuned configurations against the defaults, through the lookup that an engine uses.

python -m bench.tuned [--models gpt-oss-20b ...] [--m 1 16 ...] [--adapters 1 8] [--ranks 16 32]

At each point that a file has, both take turns on new inputs. Claims, and exit status 1 where one does not hold: never
slower beyond the noise, and at least 5 % faster wherever the defaults take over 1.3 times the byte floor.
"""

import argparse
import csv
import datetime
import gc
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.kernels import revision
from lorahost_kernels import configs
from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tune.gpu import copy_rate, this_gpu
from lorahost_kernels.tune.measure import Batch, Workbench
from lorahost_kernels.tune.timing import capture, replay_us
from lorahost_kernels.tuned import active
from lorahost_kernels.tuned.shape import KNOWN, ModelShape
from lorahost_kernels.tuned.start import load_table, this_device
from lorahost_kernels.tuned.table import Family

TURNS = 9
CSV = Path("bench/results/tuned.csv")
COLUMNS = (
    "model", "family", "adapters", "rank", "tokens", "default_us", "tuned_us", "noise", "floor_us", "source", "gpu",
    "torch", "date", "git_rev",
)  # fmt: skip
RUNS = {"gate_up": ops.gate_up, "down": ops.down, "dense": ops.linear}


@dataclass(frozen=True)
class Compared:
    """Microseconds of a family at a point; noise: half the spread of the defaults' turns, as a share."""

    default: float
    tuned: float
    noise: float
    floor: float

    @property
    def gain(self) -> float:
        """How many times as fast as the defaults."""
        return self.default / self.tuned

    def claims(self) -> list[str]:
        """Claims that don't hold."""
        wrong = []
        if self.tuned > self.default * (1 + max(self.noise, 0.01)):
            wrong.append("slower")
        if self.default > 1.3 * self.floor and self.gain < 1.05:
            wrong.append("under 5 %")
        return wrong


def step(batch: Batch, moe: bool, i: int) -> None:
    """One layer's LoRA work as an engine calls it; the tiles come from the active table or the defaults."""
    routing = batch.routings[i]
    first = next(iter(batch.products.values())).problem
    block_m = work_block_m(first.pairs, first.groups, first.rank)
    if block_m is not None:
        routing = build_work_list(routing, batch.slots, block_m) if moe else batch.grouped(block_m)[i]
    for product in batch.products.values():
        a = product.layer(i, routing)
        RUNS[product.kind](a.y, a.x, a.lora_a, a.lora_b, routing)


def compare(batch: Batch, moe: bool, choosers: list[configs.Chooser | None], floor: float) -> Compared:
    """Times the choosers in turn: the defaults, then the table."""
    calls = [partial(step, batch, moe, i) for i in range(len(batch.routings))]
    graphs = []
    for chooser in choosers:
        configs.use(chooser)
        if not moe:
            calls[0]()  # a dense layer's lists are built once a step, so before the graph
        graphs.append(capture(calls))
    configs.use(None)
    times: list[list[float]] = [[] for _ in graphs]
    replays = max(3, min(20, int(8000 / replay_us(graphs[0], 2)[0])))
    for _ in range(TURNS):
        for graph, found in zip(graphs, times, strict=True):
            graph.replay()
            found.append(median(replay_us(graph, replays)) / len(calls))
    for graph in graphs:
        graph.reset()
    default, tuned = (median(t) for t in times)
    return Compared(default, tuned, (max(times[0]) - min(times[0])) / 2 / default, floor)


def floor_us(batch: Batch, rate: float) -> float:
    """Microseconds that a call's bytes take: weights of the groups it has, activations, the base output twice."""
    total = 0.0
    touched = sum(groups_of(batch, i) for i in range(len(batch.routings))) / len(batch.routings)
    for product in batch.products.values():
        p = product.problem
        k, outs = p.sizes
        total += touched * p.rank * (k * len(outs) + sum(outs)) * 2
        total += (p.tokens if product.kind != "down" else p.pairs) * k * 2 + 2 * p.pairs * sum(outs) * 2
    return total / rate * 1e6


def groups_of(batch: Batch, i: int) -> int:
    """(slot, expert) pairs that a call's rows have."""
    r = batch.routings[i]
    slots = r.token_slots.long()[:, None]
    keys = slots if r.topk_ids is None else slots * r.num_experts + r.topk_ids.long()
    return len(set(keys.flatten().tolist()))


def points(shape: ModelShape, slots: int) -> list[tuple[Family, int, int]]:
    """(family, rank, tokens) of every point that the files have for so many slots."""
    table, notes = load_table(this_device(), shape, slots, os.environ)
    for refused in notes["refused"]:
        print("refused:", refused)
    active.activate(table, this_device().shared_limit)
    families: tuple[Family, ...] = ("moe", "dense")
    return [(f, p.rank, p.tokens) for f in families for p in table.families[f].points.values() if p.adapters == slots]


def main() -> int:
    """Prints a line for each point and the geometric mean; 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*KNOWN], default=[*KNOWN])
    parser.add_argument("--m", nargs="+", type=int)
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--rev", default=revision())
    args = parser.parse_args()
    gpu, device = this_gpu(), torch.device("cuda", torch.cuda.current_device())
    rate, gains, failed = copy_rate(device), [], 0
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for name in args.models:
        for slots in args.adapters:
            found = points(KNOWN[name], slots)
            benches: dict[tuple[Family, int], Workbench] = {}
            for family, rank, tokens in sorted(found):
                if (args.m and tokens not in args.m) or (args.ranks and rank not in args.ranks):
                    continue
                gc.collect()
                torch.cuda.empty_cache()
                if (family, rank) not in benches:
                    benches.clear()
                    benches[family, rank] = Workbench(KNOWN[name], family, slots, rank, device, l2_bytes=gpu.l2)
                batch = benches[family, rank].batch(tokens)
                chooser = configs.chooser()
                c = compare(batch, family == "moe", [None, chooser], floor_us(batch, rate))
                configs.use(chooser)
                gains.append(c.gain)
                wrong = c.claims()
                failed += bool(wrong)
                head = f"{name} {family} adapters={slots} rank={rank} M={tokens}"
                times = f"{c.default:8.1f} -> {c.tuned:8.1f} us  {c.gain:.3f} x  noise {c.noise:.1%}"
                print(f"{head:<52}{times}  floor {c.floor:.1f}  {', '.join(wrong)}", flush=True)
                row = (name, family, slots, rank, tokens, c.default, c.tuned, c.noise, c.floor, "exact")
                append(args.csv, [*row, gpu.name, torch.__version__, date, args.rev])
    if not gains:
        print("no file has a point of these")
        return 1
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    print(f"{len(gains)} points, geometric mean {mean:.3f} x, {failed} with a claim that does not hold")
    return 1 if failed else 0


def append(path: Path, row: list[object]) -> None:
    """Adds a row to a CSV file, with its header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as f:
        writer = csv.writer(f)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow([round(v, 4) if isinstance(v, float) else v for v in row])


if __name__ == "__main__":
    sys.exit(main())
