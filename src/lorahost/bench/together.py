"""Several engines on one GPU, started at the same time and measured in turn. Needs vLLM and the standard library only,
for engines behind `lorahost serve` also what that imports, and aiohttp.

python -m lorahost.bench.together --paths base,stock:marlin,ours --out rows.csv

From a checkout without installing: PYTHONPATH=src:kernels. Engines that wait for their turn leave the GPU alone. Rows
are those of lorahost.bench.engine_point; turns whose rows are in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lorahost.bench import answers, decode_profile, rows, steps, together_plan, together_report
from lorahost.bench.answers import Token
from lorahost.bench.decode_profile import Profile
from lorahost.bench.files import write_whole
from lorahost.bench.point import Point, add_common_arguments, from_arguments, to_arguments
from lorahost.bench.together_options import Options, add_arguments
from lorahost.bench.together_plan import Job, Spec, Turn
from lorahost.bench.turn_engines import Clock, TimeUpError
from lorahost.bench.turn_group import Group, Say, Start
from lorahost.bench.turns import PROBE, Ask, profile_of

Command = Callable[[Spec, Path], list[str]]


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
        own = (options.extra_of, options.slots_of, options.spec_of)
        self._specs = together_plan.specs(shared, options.paths, *own)
        probed = [spec.name for spec in self._specs if spec.point.via == "engine"]
        if options.probe and options.reference not in probed:
            raise ValueError(f"reference {options.reference!r}: must be one of the engines {', '.join(probed)}")
        if options.probe and any(spec.point.spec == "synthetic" for spec in self._specs):
            raise ValueError("probe: synthetic acceptance makes up its answers, there is nothing to compare")
        self._profiled = next((load for load in point.loads if load.concurrency), None)
        if options.profile and self._profiled is None:
            raise ValueError("profile: needs a closed load in --loads")
        self._work = (options.work or Path(tempfile.gettempdir()) / "lorahost-bench").resolve()
        self._logs = options.logs or self._work / "logs"
        self._outcome = Outcome()
        self._group: Group

    def command(self, spec: Spec, folder: Path) -> list[str]:
        """The command line of an engine that is asked in `folder`."""
        line = [sys.executable, "-m", "lorahost.bench.engine_point", *to_arguments(spec.point)]
        line += ["--work", str(self._work), "--turns", str(folder)]
        if spec.point.via == "http":
            line += ["--server-log", str(self._logs / f"{spec.file_name}-server.log")]
        return line

    def run(self, command: Command | None = None) -> Outcome:
        """Starts, probes, measures what is missing and profiles, and stops all engines whatever happens."""
        o, left = self._options, self._left()
        self._say(f"{len(self._turns) - len(left)} of {len(self._turns)} turns are in {o.out}")
        self._group = Group(self._say, self._trouble, o.start_limit, o.limit, self._clock)
        with tempfile.TemporaryDirectory(prefix="lorahost-turns-", ignore_cleanup_errors=True) as folder:
            try:
                self._group.start(self._starts(Path(folder), command or self.command))
                self._prepare()
                self._measure(self._left())
                self._profile()
            except TimeUpError as error:
                self._trouble(str(error))
            finally:
                self._group.stop()
        if missing := self._left():
            self._trouble(f"{len(missing)} of {len(self._turns)} turns are missing; run this again to add them")
        self._outcome.table = self._table()
        return self._outcome

    @property
    def _turns(self) -> list[Turn]:
        return together_plan.turns(self._specs, self._jobs, self._options.alternations)

    def _left(self) -> list[Turn]:
        found = steps.read(self._options.out)
        return [turn for turn in self._turns if not together_plan.done(turn, found)]

    def _table(self) -> str:
        return together_report.table(self._specs, self._jobs, steps.read(self._options.out))

    def _trouble(self, text: str) -> None:
        self._outcome.trouble.append(text)
        self._say(text)

    def _starts(self, folder: Path, command: Command) -> dict[str, Start]:
        """Engines with a turn left, or all if they are asked for more than rows."""
        busy = {turn.spec.name for turn in self._left()}
        every = self._options.probe or self._options.profile
        # engines that compile the same graphs at the same time would write the same files
        caches = Path(os.environ.get("VLLM_CACHE_ROOT") or self._work / "caches").resolve()
        return {
            spec.name: Start(
                command(spec, own := folder / spec.file_name),
                own,
                self._logs / f"{spec.file_name}.log",
                {"VLLM_CACHE_ROOT": str(caches / spec.file_name)},
            )
            for spec in self._specs
            if spec.name in busy or (every and spec.point.via == "engine")
        }

    def _prepare(self) -> None:
        """What is done once all are ready."""
        if self._options.probe:
            self._probe()

    def _probe(self) -> None:
        found: dict[str, dict[str, list[Token]]] = {}
        for spec in self._specs:
            if spec.point.via == "http":
                self._say(f"{spec.name}: answers through the server are not compared")
            elif answer := self._group.ask(spec.name, PROBE):
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

    def _profile(self) -> None:
        if not self._options.profile or self._profiled is None:
            return
        found: dict[str, Profile] = {}
        for spec in self._specs:
            if spec.point.via == "http":
                self._say(f"{spec.name}: an engine behind the server is not profiled")
            elif answer := self._group.ask(spec.name, profile_of(self._profiled)):
                found[spec.name] = answer["profile"]
        write_whole(self._logs / "profile.json", json.dumps(found))
        if found:
            self._say(f"\na decode step under {self._profiled}\n\n{decode_profile.table(found)}\n")
        else:
            self._trouble("no profile: there is no engine that could be asked")

    def _measure(self, left: Sequence[Turn]) -> None:
        for turn in left:
            if measured := self._measured(turn):
                rows.append(self._options.out, measured)

    def _measured(self, turn: Turn) -> list[dict[str, Any]]:
        """The rows of all repeats of a turn; none if the engine is gone."""
        measured: list[dict[str, Any]] = []
        for repeat in range(1, turn.point.repeats + 1):
            ask: Ask = {
                "what": "load", "load": str(turn.job.load), "base": turn.job.base, "alternation": turn.round,
                "repeat": repeat,
            }  # fmt: skip
            if not (answer := self._group.ask(turn.spec.name, ask)):
                return []
            measured.append(row := answer["row"])
            self._say_row(turn, row)
        return measured

    def _say_row(self, turn: Turn, row: Mapping[str, Any]) -> None:
        what = f"round {turn.round}, {turn.job}, {turn.spec.name}"
        figures = ", ".join(f"{key} {row[key]:.4g}" for key in ("otps_p50", "ttft_p50_ms", "throughput"))
        self._say(f"{self._group.seconds:4.0f} s  {what}: {figures}")
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
