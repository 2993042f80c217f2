"""One step of a benchmark: one engine start, its loads, its rows. Needs vLLM and the standard library only.

python -m lorahost.bench.engine_point --path base|stock|ours|ours-tuned|lora-base --out rows.csv

From a checkout without installing: PYTHONPATH=src:kernels. Weights are random, of the model's shape. Rows are written
when all of the step's loads are through; a step that fails writes none and exits with 1. With --turns it writes none:
it answers lorahost.bench.together.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from lorahost.bench import environment, rows
from lorahost.bench.point import add_arguments, from_arguments


def main(arguments: list[str] | None = None) -> int:
    """Runs the step; 0 with rows written, 1 with an error said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--turns", type=Path, help="folder in which lorahost.bench.together asks for repeats")
    parser.add_argument("--server-log", type=Path, help="file for the server's output, with --turns and --via http")
    options = parser.parse_args(arguments)
    try:
        point = from_arguments(options)
    except ValueError as error:
        parser.error(str(error))
    if bool(options.server_log) != bool(options.turns and point.via == "http"):
        parser.error("server-log: belongs to --turns with --via http")
    work: Path = (options.work or Path(tempfile.gettempdir()) / "lorahost-bench").resolve()
    where = rows.provenance(point.commit)
    point = replace(point, commit=where["commit"])
    environment.prepare(point, work)
    # only now: vLLM reads the environment when it is imported
    if options.turns and point.via == "http":
        import uvloop

        from lorahost.bench import http_turns

        uvloop.run(http_turns.take_turns(point, work, options.turns, options.server_log, where))
        return 0
    if options.turns:
        from lorahost.bench.vllm_026 import turn_taker

        asyncio.run(turn_taker.take_turns(point, work, options.turns, where))
        return 0
    if point.via == "http":
        import uvloop

        from lorahost.bench import http_point

        measured = uvloop.run(http_point.measure(point, work))
    else:
        from lorahost.bench.vllm_026 import engine

        measured = asyncio.run(engine.measure(point, work))
    found = [{**row, **where} for row in measured]
    rows.append(options.out, found)
    print(f"{len(found)} rows -> {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
