"""Tuned configurations against the defaults, or against another file, through the lookup that an engine uses.

python -m bench.tuned [--models gpt-oss-20b ...] [--m 1 16 ...] [--adapters 1 8] [--ranks 16 32] [--against FILE]

At each point that a file has, both take turns on new inputs. Claims, and exit status 1 where one does not hold: never
slower beyond the noise, and at least 5 % faster wherever the defaults take over 1.3 times the byte floor.
With --against the points are those that FILE has too, and the claim is that FILE is nowhere over 3 % slower.
"""

import argparse
import datetime
import gc
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.csv_rows import append
from lorahost_kernels import configs
from lorahost_kernels.configs import work_block_m
from lorahost_kernels.ops import layer as ops
from lorahost_kernels.ops.work_list.launch import build_work_list
from lorahost_kernels.tune import fused, plan
from lorahost_kernels.tune.compile import Compiler, Pair, Problem, default_jobs, problems
from lorahost_kernels.tune.gpu import command_output, this_gpu
from lorahost_kernels.tune.measure import Batch, Workbench
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.space import groupings
from lorahost_kernels.tune.timing import capture, replay_us
from lorahost_kernels.tuned.active import Active
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import KNOWN, ModelShape
from lorahost_kernels.tuned.start import load_table, this_device
from lorahost_kernels.tuned.table import FamilyPoints, Table, dense_row, moe_rows

TURNS = 9
AGAIN = 0.03  # how much slower another file's tiles may be
CSV = Path("bench/results/tuned.csv")
AGAINST = "against"  # source of rows whose default_us is the time of the file in use, and tuned_us that of another
COLUMNS = (
    "model", "family", "adapters", "rank", "tokens", "default_us", "tuned_us", "noise", "floor_us", "source", "gpu",
    "torch", "date", "git_rev",
)  # fmt: skip
RUNS: dict[str, Callable[..., None]] = {
    "gate_up": ops.gate_up,
    "down": ops.down,
    "dense": ops.linear,
    "gate_up_fused": fused.gate_up,
    "down_fused": fused.down,
}


@dataclass(frozen=True)
class Compared:
    """Microseconds of a family at a point; noise: half the spread of the first one's turns, as a share."""

    default: float
    tuned: float
    noise: float
    floor: float

    @property
    def gain(self) -> float:
        """How many times as fast as the first."""
        return self.default / self.tuned

    def claims(self, again: bool) -> list[str]:
        """Claims that don't hold; again: the first one is not the defaults but tuned too."""
        if again:
            over = self.tuned > self.default * (1 + max(self.noise, AGAIN))
            return ["over 3 % slower"] if over else []
        wrong = []
        if self.tuned > self.default * (1 + max(self.noise, 0.01)):
            wrong.append("slower")
        if self.default > 1.3 * self.floor and self.gain < 1.05:
            wrong.append("under 5 %")
        return wrong


@dataclass(frozen=True)
class Setup:
    """What is compared for one model and number of slots: the places, and who picks the tiles; None: the defaults."""

    places: list[Place]
    choosers: tuple[Active | None, Active]


def step(batch: Batch, moe: bool, i: int) -> None:
    """One layer's LoRA work as an engine calls it; the tiles come from the active table or the defaults."""
    routing = batch.routings[i]
    first = next(iter(batch.products.values())).problem
    block_m = work_block_m(first.pairs, first.groups, first.rank)
    if block_m is not None:
        routing = build_work_list(routing, batch.slots, block_m) if moe else batch.grouped(block_m)[i]
    for product in batch.products.values():
        a = product.layer(i, routing)
        RUNS[product.kind](*a.operands)


def compare(batch: Batch, moe: bool, choosers: Sequence[configs.Chooser | None], floor: float) -> Compared:
    """Times two choosers in turn."""
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
        written = p.pairs * sum(outs)
        if p.fused:
            # y is read only; the activation halves the columns, the sum leaves one row a token
            written = written // 2 if p.half == "gate_up" else p.tokens * sum(outs)
        total += ((p.tokens if p.half != "down" else p.pairs) * k + p.pairs * sum(outs) + written) * 2
    return total / rate * 1e6


def groups_of(batch: Batch, i: int) -> int:
    """(slot, expert) pairs that a call's rows have."""
    r = batch.routings[i]
    slots = r.token_slots.long()[:, None]
    keys = slots if r.topk_ids is None else slots * r.num_experts + r.topk_ids.long()
    return len(set(keys.flatten().tolist()))


def setup(shape: ModelShape, slots: int, against: Path | None, fused_experts: bool = False) -> Setup:
    """Every point that the files have for so many slots, the most valuable first.

    fused_experts: the moe_fused points, as an engine with the fused expands takes them; else all others.
    """
    device = this_device()
    table, notes = load_table(device, shape, slots, os.environ, fused_experts)
    for refused in notes["refused"]:
        print("refused:", refused)
    ours = Active(table, device.shared_limit)
    first, second, found = None, ours, keys(table, slots)
    if against is not None:
        other = Table(device.name, shape, slots, fused_experts)
        other.add_file(read(against), against.name)
        first, second, found = ours, Active(other, device.shared_limit), found & keys(other, slots)
    sizes = sorted({p.tokens for p in found})
    adapters, ranks = [slots], sorted({p.rank for p in found})
    families = ("moe_fused",) if fused_experts else ("moe", "dense")
    order = plan.places(shape, sizes, families, adapters, ranks) if found else []
    return Setup([p for p in order if p in found], (first, second))


def keys(table: Table, slots: int) -> set[Place]:
    """The points of a table that were measured with so many slots."""
    families: dict[str, FamilyPoints] = {**table.families}
    return {
        Place(f, p.tokens, slots, p.rank)
        for f, ps in families.items()
        for p in ps.points.values()
        if p.adapters == slots
    }


def candidates(shape: ModelShape, s: Setup, shared: int, programs: int) -> Iterator[tuple[Problem, Pair]]:
    """All that the comparisons launch, for the compiling processes."""
    for place in s.places:
        spaces = plan.spaces(shape, place, shared, programs)
        first = next(iter(spaces.values()))
        usual = groupings(first.pairs, first.groups, place.rank)[0]
        for name, problem in problems(shape, place).items():
            yield problem, spaces[name].default(usual)
            for chooser in filter(None, s.choosers):
                rows = next(
                    ps.points[place.adapters, place.rank, place.tokens].rows
                    for family, ps in chooser.table.families.items() if family == place.family
                )  # fmt: skip
                mode = next(iter(rows.values())).mode
                if problem.moe:
                    wanted = [moe_rows(problem.moe)[op] for op in problem.operations(mode)]
                else:
                    wanted = [dense_row(shape.modules[name], op) for op in problem.operations(mode)]
                shrink, expand = (rows.get(key) for key in wanted)
                if isinstance(shrink, configs.ShrinkConfig) and isinstance(expand, configs.ExpandConfig):
                    yield problem, (shrink, expand)


def main() -> int:
    """Prints a line for each point and the geometric mean; 1 where a claim does not hold."""
    args = arguments()
    gpu, device = this_gpu(), torch.device("cuda", torch.cuda.current_device())
    compiler = Compiler(args.jobs, gpu.capability)
    setups = {
        (n, a, f): setup(KNOWN[n], a, args.against, f)
        for n in args.models
        for a in args.adapters
        for f in ((False, True) if "moe_fused" in plan.families_of(KNOWN[n]) else (False,))
    }
    for s in setups.values():
        s.places[:] = [
            p for p in s.places if (not args.m or p.tokens in args.m) and (not args.ranks or p.rank in args.ranks)
        ]
    work = [c for (n, _, _), s in setups.items() for c in candidates(KNOWN[n], s, gpu.shared, gpu.programs)]
    print("compiled {} candidates in {:.0f} s".format(*compiler.compile(work)), flush=True)
    compiler.close()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    source = "exact" if args.against is None else AGAINST
    gains: dict[str, list[float]] = {}
    failed: Counter[str] = Counter()
    for (name, slots, _), s in setups.items():
        benches: dict[tuple[str, int], Workbench] = {}
        for place in s.places:
            gc.collect()
            torch.cuda.empty_cache()
            key = (place.family, place.rank)
            if key not in benches:
                benches[key] = Workbench(KNOWN[name], place.family, slots, place.rank, device, l2_bytes=gpu.l2)
            batch = benches[key].batch(place.tokens)
            c = compare(batch, place.family != "dense", s.choosers, floor_us(batch, gpu.rate))
            wrong = c.claims(args.against is not None)
            failed.update(wrong)
            gains.setdefault(f"{name} {place.family} {slots}x{place.rank}", []).append(c.gain)
            times = f"{c.default:8.1f} -> {c.tuned:8.1f} us  {c.gain:.3f} x  noise {c.noise:.1%}"
            print(f"{name} {place!s:<20}{times}  floor {c.floor:.1f}  {', '.join(wrong)}", flush=True)
            row = (name, place.family, slots, place.rank, place.tokens, c.default, c.tuned, c.noise, c.floor, source)
            cells = [*row, gpu.name, torch.__version__, date, args.rev]
            append(args.csv, COLUMNS, [[round(v, 4) if isinstance(v, float) else v for v in cells]])
    return report(gains, failed)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*KNOWN], default=[*KNOWN])
    parser.add_argument("--m", nargs="+", type=int)
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--against", type=Path, metavar="FILE", help="another tuned file instead of the defaults")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="compiling processes")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--rev", default=command_output("git", "rev-parse", "--short", "HEAD"))
    return parser.parse_args()


def report(gains: dict[str, list[float]], failed: Counter[str]) -> int:
    """Prints the geometric means; the exit status."""
    if not gains:
        print("no file has a point of these")
        return 1
    every = [g for group in gains.values() for g in group]
    for name, group in [*gains.items(), ("all", every)]:
        mean = math.exp(sum(map(math.log, group)) / len(group))
        extremes = f"{min(group):.3f} to {max(group):.3f}"
        print(f"{name}: {len(group)} points, geometric mean {mean:.3f} x, {extremes}")
    print(f"claims that don't hold: {', '.join(f'{n} points {what}' for what, n in failed.items()) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
