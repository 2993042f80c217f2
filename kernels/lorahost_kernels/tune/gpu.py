"""The tuner on a real GPU: what it is, and a bench that compiles in parallel and times."""

from __future__ import annotations

import datetime
import gc
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from lorahost_kernels.ops.common.defaults import programs_of
from lorahost_kernels.tune.compile import BROKEN, TOO_SLOW, Compiler, Pair
from lorahost_kernels.tune.known import Choice, Key
from lorahost_kernels.tune.measure import Batch, Workbench, WrongResultError, impossible
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tuned.shape import ModelShape

MIX = "half uniform, half Zipf: adapters with exponent 1, experts with 0.5; bfloat16"
SECOND_SEED = 1  # of a second process's inputs; the first one's are of torch's own seed
MOST_BYTES = 24 * 2**30  # of weights that are kept for the points to come
# After these nothing runs in the process any more.
FATAL = ("illegal memory access", "illegal instruction", "misaligned address", "launch failure", "device-side assert")


class NoGpuError(RuntimeError):
    """There is nothing to tune on."""


class DeviceLostError(RuntimeError):
    """A candidate broke the CUDA context; it is `candidate`, and only a new process can go on without it."""

    def __init__(self, candidate: str, failure: Exception) -> None:
        super().__init__(f"{candidate}: {failure}")
        self.candidate = candidate


@dataclass(frozen=True)
class Gpu:
    """What the tuner has to know of a GPU; shared and l2 in bytes, capability 90 for sm_90, rate in bytes a second."""

    name: str
    shared: int
    l2: int
    programs: int
    capability: int
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
        10 * p.major + p.minor,
        copy_rate(device),
    )


def current_device() -> int:
    """The index of the device that this process tunes."""
    return int(torch.cuda.current_device())


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

    def __init__(
        self, batch: Batch, compiler: Compiler, say: Callable[[str], None], banned: Sequence[str] = ()
    ) -> None:
        self.batch, self.compiler, self.say, self.banned = batch, compiler, say, banned
        self._good: dict[Key, float] = {}
        self._complained = False

    def measure(self, work: Sequence[tuple[Key, Pair]], until: float) -> list[float]:
        """See run.Bench. Raises DeviceLostError."""
        times = [float("inf")] * len(work)
        jobs = [(self.batch.products[name].problem, pair) for (name, _), pair in work]
        for i, problem in self.compiler.each(jobs, until - time.monotonic()):
            if time.monotonic() > until:
                break
            (key, pair), works = work[i], self.compiler.works
            if problem and problem != TOO_SLOW and not self._complained:
                self.say(f"a worker could not compile {key[0]} {pair}: {problem}")
                self._complained = True
            # where no worker has compiled anything it is them who are at fault, and the launch compiles
            if problem and (problem == TOO_SLOW or (works and not problem.startswith(BROKEN))):
                continue
            times[i] = self._time(key, pair)
            self._good[key] = min(self._good.get(key, float("inf")), times[i])
        return times

    def _time(self, key: Key, pair: Pair) -> float:
        """One candidate's time, infinite where its result is wrong."""
        candidate = f"{key[0]} {pair}"
        if candidate in self.banned:
            return float("inf")
        try:
            return self.batch.time(key[0], pair, self._good.get(key, float("inf")))
        except WrongResultError as failure:
            self.say(f"dropped: {failure}")
        except RuntimeError as failure:
            if any(text in str(failure) for text in FATAL):
                raise DeviceLostError(candidate, failure) from failure
            raise
        return float("inf")

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
    """Opens benches; keeps weights for the points to come.

    banned: candidates that broke an earlier run.
    """

    def __init__(
        self, shape: ModelShape, gpu: Gpu, compiler: Compiler, say: Callable[[str], None], banned: Sequence[str] = ()
    ) -> None:
        self.shape, self.gpu, self.compiler, self.say, self.banned = shape, gpu, compiler, say, banned
        self._benches: dict[tuple[str, int, int], Workbench] = {}

    def open(self, place: Place) -> GpuBench:
        """The bench of a point."""
        gc.collect()
        torch.cuda.empty_cache()
        key = (place.family, place.adapters, place.rank)
        if key not in self._benches:
            if torch.cuda.memory_allocated() > MOST_BYTES:
                self._benches.clear()
            device = torch.device("cuda", torch.cuda.current_device())
            self._benches[key] = Workbench(self.shape, *key, device, l2_bytes=self.gpu.l2)
        return GpuBench(self._benches[key].batch(place.tokens), self.compiler, self.say, self.banned)

    def close(self) -> None:
        """Gives the memory of all weights back."""
        self._benches.clear()
        gc.collect()
        torch.cuda.empty_cache()


def second_lab(
    shape: ModelShape, gpu: Gpu, device: int, banned: Sequence[str], say: Callable[[str], None]
) -> Callable[[Place], GpuBench]:
    """What opens benches in another process: on the same device, with other inputs; launches compile."""
    torch.cuda.set_device(device)
    torch.manual_seed(SECOND_SEED)
    return Lab(shape, gpu, Compiler(0), say, banned).open
