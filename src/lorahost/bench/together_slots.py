"""More adapters than slots, with both servers started at the same time on one GPU and measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
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


class SlotsTogether(Together):
    """One run: a calibration on the server with a slot for each adapter, then both loads on both."""

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
        mine = replace(options, paths=engines, base_loads=(), probe=False, **own)
        super().__init__(point, mine, say, clock)
        self._few = few
        many = next(spec for spec in self._specs if spec.name == MANY)
        self._calibration = Turn(1, Job(loads[0]), Spec(MANY, replace(many.point, benchmark=slots.CALIBRATION)))
        self._plan_loads()

    def _plan_loads(self) -> None:
        """Both loads once the calibration's rows are there; before, the one whose rate needs no rows."""
        found = self._found(self._calibration.spec, self._calibration.job)
        opened = [Job(Load(rate=slots.rate_of(found)))] if done(self._calibration, found) else []
        self._jobs = [*opened, Job(Load(concurrency=slots.CLOSED))]

    def _prepare(self) -> None:
        if done(self._calibration, steps.read(self._options.out)):
            return
        if measured := self._measured(self._calibration):
            rows.append(self._options.out, [{**row, "benchmark": slots.CALIBRATION} for row in measured])
            self._plan_loads()
        else:
            self._trouble("the open loop is not measured: there is no calibration, from which its rate comes")

    def _found(self, spec: Spec, job: Job) -> list[Row]:
        return rows_of(steps.read(self._options.out), spec, job)

    def _table(self) -> str:
        found = [row for spec in self._specs for job in self._jobs for row in self._found(spec, job)]
        try:
            claims = slots.claims(found, self._specs[0].point.adapters, self._few)
        except rows.RowsError as error:
            self._trouble(f"no claims: {error}")
            return super()._table()
        self._outcome.trouble += [f"claim does not hold: {claim.what}" for claim in claims if not claim.holds]
        return f"{super()._table()}\n\n{slots.report(claims)}"
