"""The tuner's command line; `lorahost tune` hands its arguments on to `main`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.load import gpu_key
from lorahost_kernels.tuned.shape import KNOWN, ModelShape, ShapeError, from_config, sharded

UNITS = {"s": 1, "m": 60, "h": 3600}
FAMILIES = ("moe", "dense", "moe_fused")


def seconds(text: str) -> float:
    """Seconds of 90, 90s, 8m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 8m or 1h")
    return float(found[1]) * UNITS[found[2] or "s"]


def batch_sizes(text: str) -> list[int]:
    """Numbers of tokens: `1,2,4..64` doubles from the number before the dots to the last."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65536:
            raise argparse.ArgumentTypeError(f"{part!r} is no size or first..last, from 1 to 65536")
        while first <= last:
            sizes.append(first)
            first *= 2
    return sorted(set(sizes))


def count(low: int, high: int) -> Any:
    """A type of whole numbers from low to high."""

    def parse(text: str) -> int:
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {low} to {high}")
        return int(text)

    return parse


def counts(low: int, high: int) -> Any:
    """A type of whole numbers from low to high with commas between them, each once, in the order given."""
    one = count(low, high)

    def parse(text: str) -> list[int]:
        return list(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return parse


def model_shape(model: str) -> ModelShape:
    """The shape of a known name, or of a model's directory or config.json.

    Raises:
        ShapeError: neither, or a config that says too little.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ShapeError(
            f"--model: {model!r} is no file, no directory with a config.json, and none of {', '.join(KNOWN)}"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise ShapeError(f"{file}: want an object")
    name = re.sub(r"[^\w.-]+", "-", file.resolve().parent.name).strip("-.").lower() or "model"
    return from_config(config, name)


def parser(program: str) -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog=program, description="Tune the LoRA kernels for this GPU and a model's shape; the result is a file."
    )
    p.add_argument("--model", required=True, help=f"a model's directory or config.json, or {', '.join(KNOWN)}")
    p.add_argument("--adapters", type=counts(1, 1024), default=[8], metavar="N,N", help="adapter slots of engines (8)")
    p.add_argument("--rank", type=counts(1, 512), default=[32], metavar="N,N", help="ranks of the adapters' slots (32)")
    p.add_argument("--budget", type=seconds, default=480.0, metavar="TIME", help="90s, 8m, 1h (8m)")
    p.add_argument("--sizes", type=batch_sizes, default=batch_sizes("1..8192"), help="tokens, 1,2,4..8192 (1..8192)")
    families = "dense, moe, or moe_fused: experts with the fused expands (dense, and moe_fused for gpt-oss, else moe)"
    p.add_argument("--families", nargs="+", choices=FAMILIES, help=families)
    p.add_argument("--tensor-parallel", type=count(1, 64), default=1, metavar="N", help="GPUs of one engine (1)")
    p.add_argument("--out", type=Path, metavar="FILE", help="the file (tuned_configs/GPU/MODEL.json)")
    p.add_argument("--state", type=Path, metavar="FILE", help="what a stopped run had done (FILE.state)")
    p.add_argument("--jobs", type=count(0, 256), help="compiling processes (cores - 2, 14 at most; 0: none)")
    p.add_argument(
        "--from-scratch", action="store_true", help="begin from the defaults, not from points that are there"
    )
    p.add_argument("--rev", help="git revision for the file where there is no checkout")
    p.add_argument("--dry-run", action="store_true", help="print the plan and its size; needs no GPU")
    return p


def main(arguments: Sequence[str] | None = None, program: str = "python -m lorahost_kernels.tune") -> int:
    """Tunes; 1 with a message where that can't be done, 2 for wrong arguments."""
    started = time.monotonic()
    args = parser(program).parse_args(arguments)
    try:
        shape = sharded(model_shape(args.model), args.tensor_parallel)
        return dry_run(args, shape) if args.dry_run else tune(args, shape, started)
    except (ShapeError, ConfigError, RefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class RefusedError(RuntimeError):
    """The run can't begin; the message says why."""


def dry_run(args: argparse.Namespace, shape: ModelShape) -> int:
    """Prints the plan for an H200."""
    from lorahost_kernels.configs import PROGRAMS
    from lorahost_kernels.tune import plan

    print(plan.describe(shape, points(args, shape), args.budget, 227 * 1024, PROGRAMS))
    return 0


def points(args: argparse.Namespace, shape: ModelShape) -> list[Any]:
    """The points in the order of their value. Raises RefusedError where the model has none."""
    from lorahost_kernels.tune import plan

    families = args.families or plan.families_of(shape)
    todo = plan.places(shape, args.sizes, families, args.adapters, args.rank)
    if not todo:
        raise RefusedError(f"{shape.name} has no {' or '.join(families)} operations")
    return todo


def tune(args: argparse.Namespace, shape: ModelShape, started: float) -> int:
    """Runs the plan, then confirms what it changed.

    Returns 3 where a candidate broke the CUDA context, so that the same command goes on without it, and 4 where the
    second process failed otherwise, so that the same command confirms again.
    """
    try:
        from lorahost_kernels.tune import compile as compiling
        from lorahost_kernels.tune import gpu
    except ImportError as error:
        raise RefusedError(f"tuning needs torch and Triton: {error}") from None
    from lorahost_kernels.tune import confirm, plan
    from lorahost_kernels.tune.run import Tuner

    device, output = prepare(args, shape)
    state = output.state
    todo = points(args, shape)
    compiler = compiling.Compiler(compiling.default_jobs() if args.jobs is None else args.jobs, device.capability)
    lab = gpu.Lab(shape, device, compiler, say, state.banned)
    spaces = partial(plan.spaces, shape, shared_limit=device.shared, programs=device.programs)
    tuner = Tuner(spaces, time.monotonic, say)
    begin(tuner, output, args.from_scratch)
    say(f"{device.name}, {', '.join(f'{k} {v}' for k, v in output.run.items() if k not in ('date', 'mix'))}")
    say(f"{shape.name}: {len(todo)} points into {output.path}")
    if state.results:
        say(f"{len(state.results)} points are done by an earlier run ({state.path})")
    deadline = started + args.budget

    def kept() -> float:
        # the point that comes may change, too
        return plan.kept(args.budget, len(confirm.changed(tuner, todo)) + 1)

    try:
        left = tuner.tune(todo, lab.open, deadline, output.add, kept)
        # the second process gets the memory and the cores
        lab.close()
        compiler.close()
        opener = partial(gpu.second_lab, shape, device, gpu.current_device(), state.banned)
        checked = confirm.confirm(tuner, todo, opener, deadline - time.monotonic(), output.add)
    except gpu.DeviceLostError as error:
        state.ban(error.candidate)
        print(f"error: {error}; the same command goes on without this candidate", file=sys.stderr)
        return 3
    finally:
        compiler.close()
        output.write()
    report(state.results, len(left))
    tables(shape, state.results, device.rate)
    say(str(checked))
    status = failed(checked, state) if checked.failure else 0
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        say(f"no time for {', '.join(map(str, left[:8]))}{more}: the same command goes on from there")
    elif not status:
        state.finish()
    say(f"{output.path}: {time.monotonic() - started:.0f} s")
    return status


def begin(tuner: Any, output: Any, from_scratch: bool) -> None:
    """Teaches the tuner what is in use, what other models' files have, and what a stopped run found."""
    from lorahost_kernels.tune import shipped
    from lorahost_kernels.tune.known import choice_of

    state = output.state
    own: list[Any] = []
    if not from_scratch:
        found, others = shipped.starts(output.gpu, output.shape, os.environ, say)
        own = [*found, *output.known]
        for result in own:
            tuner.learn(result)
        for result in others:
            tuner.learn(result, other=True)
    if state.starts is None:
        # as an engine keeps the first file's point
        state.starts = [*{result.place: result for result in reversed(own)}.values()]
    tuner.known.used = {result.place: choice_of(result) for result in state.starts}
    for result in state.results:
        tuner.resume(result)


def failed(checked: Any, state: Any) -> int:
    """Says that the second process failed; the exit status."""
    error, left = checked.failure, len(checked.missing)
    reset = f"{checked.given_up} has its defaults, " if checked.given_up else ""
    again = "confirms them"
    if error.candidate:
        state.ban(error.candidate)
        again = "goes on without this candidate"
    print(
        f"error: the second process failed: {error}; {reset}{left} points stay as the first one found them, "
        f"unconfirmed; the same command {again}",
        file=sys.stderr,
    )
    return 3 if error.candidate else 4


def prepare(args: argparse.Namespace, shape: ModelShape) -> tuple[Any, Any]:
    """(the GPU, the output). Raises RefusedError or ConfigError before any work."""
    from lorahost_kernels.tune import gpu
    from lorahost_kernels.tune.output import Output
    from lorahost_kernels.tune.state import StateError

    try:
        device = gpu.this_gpu()
        path = args.out or Path("tuned_configs") / gpu_key(device.name) / f"{shape.name}.json"
        sizes = "x".join("-".join(map(str, numbers)) for numbers in (args.adapters, args.rank))
        state = args.state or path.with_name(f"{path.name}.{sizes}.state")
        return device, Output(path, state, shape, device.name, gpu.provenance(args.rev))
    except (gpu.NoGpuError, StateError) as error:
        raise RefusedError(str(error)) from None


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


def tables(shape: ModelShape, results: Sequence[Any], rate: float) -> None:
    """What the points are worth in an engine's step, by adapters and rank; rate: bytes a second."""
    from lorahost_kernels.tune import estimate

    for adapters, rank in dict.fromkeys((r.adapters, r.rank) for r in results):
        say(f"{adapters} adapters, rank {rank}:")
        own = [r for r in results if (r.adapters, r.rank) == (adapters, rank)]
        say(estimate.table(shape, own, rate))


def report(results: Sequence[Any], left: int) -> None:
    """Before and after of each operation over all points, by the geometric mean."""
    from math import exp, log

    gains: dict[str, list[float]] = {}
    for r in results:
        gains.setdefault(f"{r.family} (whole)", []).append(r.before_us / r.after_us)
        for name, row in r.rows.items():
            gains.setdefault(" ".join(filter(None, name)), []).append(row.before_us / row.after_us)
    say(f"{len(results)} points done, {left} left; before / after, geometric mean and extremes:")
    for name, factors in gains.items():
        mean = exp(sum(map(log, factors)) / len(factors))
        say(f"  {name:22} {mean:.3f} x  ({min(factors):.2f} to {max(factors):.2f}, {len(factors)} points)")
