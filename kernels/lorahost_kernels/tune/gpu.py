"""The tuner on a real GPU: what it is, and a bench that compiles in parallel and times."""

from __future__ import annotations

import datetime
import gc
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from lorahost_kernels.ops.common.defaults import programs_of
from lorahost_kernels.ops.common.launch import has_pdl
from lorahost_kernels.tune.compile import TOO_SLOW, Compiler, Pair
from lorahost_kernels.tune.measure import Batch, Workbench, WrongResultError, impossible
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import Choice, Key
from lorahost_kernels.tuned.shape import ModelShape

MIX = "half uniform, half Zipf: adapters with exponent 1, experts with 0.5; bfloat16"
SHARED_H200 = 227 * 1024


class NoGpuError(RuntimeError):
    """There is nothing to tune on."""


@dataclass(frozen=True)
class Gpu:
    """What the tuner has to know of a GPU; shared and l2 in bytes, rate in bytes per second."""

    name: str
    shared: int
    l2: int
    programs: int
    pdl: bool
    rate: float


def this_gpu() -> Gpu:
    """The first visible GPU. Raises NoGpuError."""
    if not torch.cuda.is_available():
        raise NoGpuError("tuning needs an NVIDIA GPU that torch can use; --dry-run prints the plan anywhere")
    device = torch.device("cuda", torch.cuda.current_device())
    p: Any = torch.cuda.get_device_properties(device)
    return Gpu(
        p.name,
        p.shared_memory_per_block_optin,
        p.L2_cache_size,
        programs_of(device),
        has_pdl(device),
        copy_rate(device),
    )


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    target.copy_(source)
    marks[0].record()
    for _ in range(10):
        target.copy_(source)
    marks[1].record()
    torch.cuda.synchronize()
    return float(10 * 2 * source.numel() / (marks[0].elapsed_time(marks[1]) * 1e-3))


def provenance(revision: str | None) -> dict[str, str]:
    """With what is measured: the `runs` entry of the file."""
    return {
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git_revision": revision
        or command_output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "mix": MIX,
    }


def command_output(*command: str) -> str:
    """First line of a command's output, or unknown."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip() or "unknown"


class GpuBench:
    """A `run.Bench` on a batch; says what is wrong with a candidate and goes on without it."""

    def __init__(self, batch: Batch, compiler: Compiler, say: Callable[[str], None]) -> None:
        self.batch, self.compiler, self.say = batch, compiler, say
        self._good: dict[Key, float] = {}
        self._complained = False

    def measure(self, work: Sequence[tuple[Key, Pair]]) -> list[float]:
        """See run.Bench."""
        times = [float("inf")] * len(work)
        jobs = [(self.batch.products[name].problem, pair) for (name, _), pair in work]
        for i, problem in self.compiler.each(jobs):
            if problem and not self._complained:
                # compiled again where it is launched: the tiles may be at fault, or the workers
                self.say(f"a worker could not compile {work[i][1]}: {problem}")
                self._complained = True
            if problem == TOO_SLOW:
                continue
            key, pair = work[i]
            try:
                times[i] = self.batch.time(key[0], pair, self._good.get(key, float("inf")))
            except WrongResultError as failure:
                self.say(f"dropped: {failure}")
            self._good[key] = min(self._good.get(key, float("inf")), times[i])
        return times

    def list_time(self, block_m: int | None) -> float:
        """See run.Bench."""
        return self.batch.list_time(block_m)

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        """See run.Bench."""
        return self.batch.turns(choices)

    def halves(self, name: str, pair: Pair) -> tuple[float, float]:
        """See run.Bench."""
        return self.batch.halves(name, pair)

    def right(self, choice: Choice) -> bool:
        """See run.Bench."""
        try:
            self.batch.check_whole(choice)
        except WrongResultError as failure:
            self.say(str(failure))
            return False
        except Exception as failure:
            if not impossible(failure):
                raise
            self.say(f"no memory to check the whole batch: {failure}")
            return False
        return True


class Lab:
    """Opens benches; holds the weights of one family at a time."""

    def __init__(
        self, shape: ModelShape, slots: int, rank: int, gpu: Gpu, compiler: Compiler, say: Callable[[str], None]
    ) -> None:
        self.shape, self.slots, self.rank, self.gpu = shape, slots, rank, gpu
        self.compiler, self.say = compiler, say
        self._benches: dict[str, Workbench] = {}

    def open(self, place: Place) -> GpuBench:
        """The bench of a point."""
        gc.collect()
        torch.cuda.empty_cache()
        if place.family not in self._benches:
            device = torch.device("cuda", torch.cuda.current_device())
            sizes = (self.slots, self.rank, device)
            self._benches[place.family] = Workbench(self.shape, place.family, *sizes, l2_bytes=self.gpu.l2)
        return GpuBench(self._benches[place.family].batch(place.tokens), self.compiler, self.say)
