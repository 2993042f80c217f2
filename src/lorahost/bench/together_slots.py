"""More adapters than slots, with both servers started at the same time on one GPU and measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lorahost.bench import rows, slots, steps
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.rows import Row
from lorahost.bench.together import Together, say_at_once
from lorahost.bench.together_options import Options
from lorahost.bench.together_plan import Job, Spec, Turn, done, rows_of
from lorahost.bench.turn_engines import Clock

MANY, FEW = "many", "few"
# the open loop until it is calibrated
UNKNOWN = Load()


class SlotsTogether(Together):
    """One run: calibrations on the server with a slot for each adapter, then both loads on both."""

    def __init__(
        self,
        point: Point,
        few: int,
        options: Options,
        say: Callable[[str], None] = say_at_once,
        clock: Clock = time.monotonic,
    ) -> None:
        """Plans it.

        Args:
            point: The point, its path with it; its loads are replaced.
            few: Slots of the second server.
            options: Those of `ROOM` and what every command has; the others are replaced.
            say: Gets progress.
            clock: Of the limits.

        Raises:
            ValueError: `few` is not below the number of adapters.
        """
        slots.check_few(point, few)
        loads = (Load(concurrency=slots.IN_FLIGHT), Load(concurrency=slots.CLOSED))
        point = replace(point, benchmark="slots", slots=point.adapters, loads=loads)
        engines = f"{MANY}={point.path}@http,{FEW}={point.path}@http"
        own: dict[str, Any] = {"extra_of": {}, "slots_of": {FEW: few}, "spec_of": {}}
        mine = replace(options, paths=engines, base_loads=(), probe=False, profile=False, **own)
        super().__init__(point, mine, say, clock)
        self._few = few
        many = next(spec for spec in self._specs if spec.name == MANY)
        self._calibrated = Spec(MANY, replace(many.point, benchmark=slots.CALIBRATION))
        self._plan_loads()

    def _calibrations(self) -> Iterator[Turn]:
        """The closed loop and, once its rows are there, the open loop at the rate that they suggest."""
        closed = Turn(1, Job(Load(concurrency=slots.IN_FLIGHT)), self._calibrated)
        yield closed
        if found := self._rows(closed):
            yield Turn(1, Job(Load(rate=slots.suggested_rate(found))), self._calibrated)

    def _rows(self, turn: Turn) -> list[Row]:
        """Those of a turn that is done; else none."""
        found = self._found(turn.spec, turn.job)
        return found if done(turn, found) else []

    def _plan_loads(self) -> None:
        """Both loads; the open one's rate is known once all rows of the calibrations are there."""
        *_, last = self._calibrations()
        found = self._rows(last)
        opened = Load(rate=slots.rate_of(found)) if found else UNKNOWN
        self._jobs = [Job(opened), Job(Load(concurrency=slots.CLOSED))]

    def _prepare(self) -> None:
        for turn in self._calibrations():
            if not self._rows(turn) and (measured := self._measured(turn)):
                rows.append(self._options.out, [{**row, "benchmark": slots.CALIBRATION} for row in measured])
        self._plan_loads()
        if self._jobs[0].load == UNKNOWN:
            self._trouble("the open loop is not measured: there is no calibration, from which its rate comes")

    def _measure(self, left: Sequence[Turn]) -> None:
        super()._measure([turn for turn in left if turn.job.load != UNKNOWN])

    def _found(self, spec: Spec, job: Job) -> list[Row]:
        return rows_of(steps.read(self._options.out), spec, job)

    def _table(self) -> str:
        found = [row for spec in self._specs for job in self._jobs for row in self._found(spec, job)]
        adapters = self._specs[0].point.adapters
        try:
            claims = slots.claims(found, adapters, self._few)
        except rows.RowsError as error:
            self._trouble(f"no claims: {error}")
            return super()._table()
        self._outcome.trouble += [f"claim does not hold: {claim.what}" for claim in claims if not claim.holds]
        parts = (super()._table(), slots.in_flight(found, adapters, self._few), slots.report(claims))
        return "\n\n".join(parts)
