"""Takes an engine's place when turns are tested: understands its command line, answers at once, has no engine.

`extra` says how it misbehaves: `fail` ends it before it is ready, `never` leaves it unready, `die` is the ask at which
it ends, `hang` the one that it never answers; `never` and `hang` leave a file at `mark`. `shift` moves its
log-probabilities, `token` is what it answers, `errors` how many requests of a repeat fail.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.unit.bench_rows import written

from lorahost.bench import turns
from lorahost.bench.decode_profile import Profile
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, add_arguments, from_arguments

OTPS = {"base": 200.0, "stock": 100.0, "ours": 150.0, "ours-tuned": 160.0, "lora-base": 180.0}


def profile(span_us: float, load: str) -> Profile:
    """A step of one kernel, which is called as the load is."""
    return {
        "steps": 20, "span_us": span_us, "busy_us": span_us, "between_us": 0.0, "waiting_us": 0.0, "overlapped_us": 0.0,
        "kernels": 1.0, "launch_us": 5.0, "by_name": {f"kernel of {load}": {"count": 1.0, "us": span_us}},
    }  # fmt: skip


class StandIn:
    """One engine; `run` and the date tell its start from others."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self._asks = 0

    async def act(self, ask: turns.Ask) -> dict[str, Any]:
        self._asks += 1
        extra = self._point.extra
        if self._asks == extra.get("die"):
            print("stand-in: out of memory", flush=True)
            sys.exit(9)
        if self._asks == extra.get("hang"):
            _mark(extra)
            await asyncio.sleep(600)
        if ask["what"] == "probe":
            token, shift = extra.get("token", 7), extra.get("shift", 0.0)
            near = {7: -1.0 + shift, 8: -1.05 + shift, 9: -3.0 + shift}
            who = ["base", "a0"] if self._point.lora else ["base"]
            return {"answers": {f"3/{name}/alone": [(token, near)] * 6 for name in who}}
        if ask["what"] == "profile":
            return {"profile": profile(OTPS[self._point.path], ask["load"])}
        point = turns.row_point(self._point, ask["base"], ask["alternation"])
        [row] = written(point, [OTPS[point.path] + ask["alternation"]], f"run-{self._point.path}")[:1]
        if errors := self._point.extra.get("errors"):
            row |= {"errors": errors, "error_kinds": f"OSError x {errors}"}
        return {"row": {**row, "load": str(Load.parse(ask["load"])), "repeat": ask["repeat"], "commit": point.commit}}


def _mark(extra: dict[str, Any]) -> None:
    Path(extra["mark"]).touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--server-log", type=Path)
    options = parser.parse_args()
    point = from_arguments(options)
    print("stand-in starts", flush=True)
    if point.extra.get("fail"):
        sys.exit("stand-in: no such GPU")
    if point.extra.get("never"):
        _mark(point.extra)
        asyncio.run(asyncio.sleep(600))
    asyncio.run(turns.serve(options.turns, {}, StandIn(point).act))


if __name__ == "__main__":
    main()
