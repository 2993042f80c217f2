"""Several engines on one GPU, started at the same time and measured in turn. Needs vLLM and the standard library only.

python -m lorahost.bench.together --paths base,stock:marlin,ours --out rows.csv

From a checkout without installing: PYTHONPATH=src:kernels. Engines that wait for their turn leave the GPU alone. Rows
are those of lorahost.bench.engine_point; turns whose rows are in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lorahost.bench import answers, rows, steps, together_plan, together_report
from lorahost.bench.answers import Token
from lorahost.bench.files import write_whole
from lorahost.bench.point import Point, add_common_arguments, from_arguments, to_arguments
from lorahost.bench.together_options import Options, add_arguments
from lorahost.bench.together_plan import Job, Spec, Turn
from lorahost.bench.turn_engines import Clock, EngineDiedError, TimeUpError, TurnEngine, stop
from lorahost.bench.turns import POLL_SECONDS, PROBE, Ask

Command = Callable[[Spec, Path], list[str]]
Say = Callable[[str], None]


def say_at_once(text: str) -> None:
    """Prints without a buffer, so that a pipe has it when the run is cut."""
    print(text, flush=True)


@dataclass
class Outcome:
    """What became of a run; `trouble` says in words what is missing or differs, and is empty if nothing is."""

    trouble: list[str] = field(default_factory=list)
    table: str = ""


class Together:
    """One run."""

    def __init__(self, point: Point, options: Options, say: Say = say_at_once, clock: Clock = time.monotonic) -> None:
        """Plans it.

        Raises:
            ValueError: an option is impossible; the message names it.
        """
        self._options = options
        self._say = say
        self._clock = clock
        self._jobs = [*(Job(load) for load in point.loads), *(Job(load, base=True) for load in options.base_loads)]
        room = {"kv_cache_memory_bytes": options.kv_bytes, "gpu_memory_utilization": options.utilization}
        every = tuple(dict.fromkeys(job.load for job in self._jobs))
        commit = point.commit or rows.revision()
        shared = replace(point, loads=every, commit=commit, extra={**room, **point.extra})
        self._specs = together_plan.specs(shared, options.paths, options.extra_of)
        self._turns = together_plan.turns(self._specs, self._jobs, options.alternations)
        if options.probe and options.reference not in (names := [spec.name for spec in self._specs]):
            raise ValueError(f"reference {options.reference!r}: must be one of the engines {', '.join(names)}")
        if options.probe and point.spec == "synthetic":
            raise ValueError("probe: synthetic acceptance makes up its answers, there is nothing to compare")
        self._work = (options.work or Path(tempfile.gettempdir()) / "lorahost-bench").resolve()
        self._logs = options.logs or self._work / "logs"
        self._engines: dict[str, TurnEngine] = {}
        self._outcome = Outcome()
        self._began = 0.0

    def command(self, spec: Spec, folder: Path) -> list[str]:
        """The command line of an engine that is asked in `folder`."""
        line = [sys.executable, "-m", "lorahost.bench.engine_point", *to_arguments(spec.point)]
        return [*line, "--work", str(self._work), "--turns", str(folder)]

    def run(self, command: Command | None = None) -> Outcome:
        """Starts, probes and measures what is missing, and stops all engines whatever happens."""
        out = self._options.out
        left = [turn for turn in self._turns if not together_plan.done(turn, steps.read(out))]
        self._say(f"{len(self._turns) - len(left)} of {len(self._turns)} turns are in {out}")
        needed = [s for s in self._specs if self._options.probe or any(turn.spec == s for turn in left)]
        self._began = self._clock()
        with tempfile.TemporaryDirectory(prefix="lorahost-turns-") as folder:
            try:
                self._start(needed, Path(folder), command or self.command)
                if self._options.probe:
                    self._probe()
                self._measure(left)
            except TimeUpError as error:
                self._trouble(str(error))
            finally:
                stop(list(self._engines.values()))
        missing = [turn for turn in self._turns if not together_plan.done(turn, steps.read(out))]
        if missing:
            self._trouble(f"{len(missing)} of {len(self._turns)} turns are missing; run this again to add them")
        self._outcome.table = together_report.table(self._specs, self._jobs, steps.read(out))
        return self._outcome

    def _trouble(self, text: str) -> None:
        self._outcome.trouble.append(text)
        self._say(text)

    def _seconds(self) -> float:
        return self._clock() - self._began

    def _start(self, needed: Sequence[Spec], folder: Path, command: Command) -> None:
        for spec in needed:
            own = folder / spec.name.replace(":", "-")
            own.mkdir()
            log = self._logs / f"{own.name}.log"
            self._engines[spec.name] = TurnEngine(spec.name, command(spec, own), own, log)
        waiting = set(self._engines)
        while waiting:
            for name in sorted(waiting):
                engine = self._engines[name]
                try:
                    if engine.ready:
                        waiting.discard(name)
                        self._say(f"{name} is ready after {self._seconds():.0f} s")
                    elif self._seconds() > min(self._options.start_limit, self._options.limit):
                        raise EngineDiedError(engine.story(f"is not ready after {self._seconds():.0f} s"))
                except EngineDiedError as error:
                    waiting.discard(name)
                    self._lose(name, error)
            time.sleep(POLL_SECONDS)

    def _lose(self, name: str, error: EngineDiedError) -> None:
        self._trouble(str(error))
        self._engines.pop(name).kill()

    def _ask(self, name: str, ask: Ask) -> dict[str, Any] | None:
        """The answer, or None of an engine that is gone."""
        if name not in self._engines:
            return None
        try:
            return self._engines[name].ask(ask, self._began + self._options.limit, self._clock)
        except EngineDiedError as error:
            self._lose(name, error)
            return None
        except TimeUpError:
            # it is in the middle of something whose answer is lost
            self._engines.pop(name).kill()
            raise

    def _probe(self) -> None:
        found: dict[str, dict[str, list[Token]]] = {}
        for spec in self._specs:
            if answer := self._ask(spec.name, PROBE):
                found[spec.name] = answers.read(answer["answers"])
        write_whole(self._logs / "probe.json", json.dumps(found))
        name = self._options.reference
        for other in found:
            if name in found and other != name:
                apart = answers.difference(found[name], found[other])
                text = answers.text(name, other, apart)
                (self._trouble if apart.differing else self._say)(text)
        if name not in found:
            self._trouble(f"no answers are compared: there are none of the reference {name}")

    def _measure(self, left: Sequence[Turn]) -> None:
        for turn in left:
            measured: list[Mapping[str, object]] = []
            for repeat in range(1, turn.point.repeats + 1):
                ask: Ask = {
                    "what": "load", "load": str(turn.job.load), "base": turn.job.base, "alternation": turn.round,
                    "repeat": repeat,
                }  # fmt: skip
                if not (answer := self._ask(turn.spec.name, ask)):
                    break
                measured.append(row := answer["row"])
                self._say_row(turn, row)
            else:
                rows.append(self._options.out, measured)

    def _say_row(self, turn: Turn, row: Mapping[str, Any]) -> None:
        what = f"round {turn.round}, {turn.job}, {turn.spec.name}"
        figures = ", ".join(f"{key} {row[key]:.4g}" for key in ("otps_p50", "ttft_p50_ms", "throughput"))
        self._say(f"{self._seconds():4.0f} s  {what}: {figures}")
        if row["errors"]:
            self._trouble(f"{what}: {row['errors']} of {row['requests']} requests failed: {row['error_kinds']}")


def report(outcome: Outcome, say: Say = say_at_once) -> int:
    """Says what went wrong and, last, the table; the exit code."""
    if outcome.trouble:
        say("\nnot as asked:")
        for text in outcome.trouble:
            say(f"- {text.splitlines()[0]}")
    say(f"\n{outcome.table}")
    return 1 if outcome.trouble else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs it; 0 if all turns are in the file and no answers differ, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    add_arguments(parser)
    parser.set_defaults(path="ours", repeats=1, warmup=1, benchmark="together", out=Path("bench/results/together.csv"))
    given = parser.parse_args(arguments)
    try:
        run = Together(from_arguments(given), Options.of(vars(given)))
    except ValueError as error:
        parser.error(str(error))
    try:
        return report(run.run())
    except rows.RowsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
