"""Tables of what LoRA costs: every engine's figures and their shares of the engine without LoRA.

`python -m lorahost.bench.tables FILE` is `lorahost bench tables FILE` on a host with the standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lorahost.bench import compare, rows
from lorahost.bench.formatting import markdown
from lorahost.bench.rows import POINT, Row

METRICS = ("otps_p50", "ttft_p50_ms", "throughput")
# what tells the engines of a point apart
WAY = ("path", "via", "moe_backend", "kernels", "extra", "slots")
NAMES = {
    "base": "no LoRA",
    "stock": "vLLM",
    "ours": "lorahost, built-in tiles",
    "ours-tuned": "lorahost, as shipped (tuned tiles)",
    "lora-base": "without an adapter: ",
}


def report(found: Sequence[Row]) -> str:
    """For every point and load: each variant's medians, and those of its OTPS and TTFT over the engine without LoRA.

    In brackets are the smallest and largest of one round; see `compare.over_rounds`.
    """
    blocks = []
    for key, mine in compare.groups(found, POINT).items():
        base = without_lora(mine)
        lines = [["path", "starts", "OTPS p50", "TTFT p50 ms", "tok/s", "OTPS / no LoRA", "TTFT / no LoRA", "errors"]]
        for way, side in compare.groups(mine, WAY).items():
            kernels = [f"kernels {way[3]}"] if way[0] == "lora-base" else []
            title = " ".join([way[0] + (":http" if way[1] == "http" else ""), *kernels, *_differing(way, mine)])
            cells = [compare.spread(side, metric).text() for metric in METRICS]
            shares = [compare.over_rounds(metric, side, base).text(3) for metric in METRICS[:2]]
            errors = sum(int(row["errors"]) for row in side)
            lines.append([title, str(len({row["run"] for row in side})), *cells, *shares, str(errors)])
        blocks.append(f"{_point(key)}\n\n{markdown(lines)}")
    return "\n\n".join(blocks)


def summary(found: Sequence[Row]) -> str:
    """The pages' table of every point and load: medians over the rounds, in brackets the smallest and largest.

    TTFT's p50 is over a round's requests; the last first token is when all requests that came at once have one.
    The share is that of the engine without LoRA or, where only engines with LoRA were measured, of the same engine
    in its process.
    """
    blocks = []
    for key, mine in compare.groups(found, POINT).items():
        base = without_lora(mine)
        of = "of no LoRA" if base else "of the engine alone"
        lines = [["engine", "OTPS", of, "TTFT p50, ms", "last first token, ms"]]
        ways = compare.groups(mine, WAY)
        for way, side in ways.items():
            reference = base or ways.get((way[0], "engine", *way[2:]), [])
            share = compare.over_rounds("otps_p50", side, reference)
            figures = [compare.spread(side, metric).text() for metric in ("otps_p50", "ttft_p50_ms", "ttft_max_ms")]
            name = ", ".join([NAMES.get(way[0], way[0]) + _asked(way), *_differing(way, mine)])
            lines.append([name, figures[0], f"{100 * share.value:.0f} %" if share.measured else "-", *figures[1:]])
        blocks.append(f"{_point(key)}, rounds {len(compare.rounds(mine))}\n\n{markdown(lines)}")
    return "\n\n".join(blocks)


def without_lora(found: Sequence[Row]) -> list[Row]:
    """The rows of one point's engine without LoRA; of several, those of the backend that vLLM chooses, or the first."""
    ways = compare.groups([row for row in found if row["path"] == "base" and row["via"] == "engine"], WAY)
    return next((side for side in ways.values() if side[0]["moe_backend"] == "auto"), next(iter(ways.values()), []))


def _point(key: Sequence[str]) -> str:
    return ", ".join(f"{column} {value}" for column, value in zip(POINT, key, strict=True) if value)


def _asked(way: Sequence[str]) -> str:
    """Whose kernels answered the base model's traffic, and whether through HTTP."""
    kernels = "" if way[0] != "lora-base" else "lorahost" if way[3] == "on" else "vLLM"
    return kernels + (" through HTTP" if way[1] == "http" else "")


def _differing(way: Sequence[str], found: Sequence[Row]) -> list[str]:
    """What tells one way from the others: its backend, and slots and engine arguments that not all have."""
    every = [json.loads(row["extra"] or "{}") for row in found]
    own = json.loads(way[4] or "{}")
    more = [f"{name}={json.dumps(value)}" for name, value in own.items() if any(e.get(name) != value for e in every)]
    slots = {row["slots"] for row in found if row["path"] == way[0]}
    return [*([way[2]] if way[2] != "auto" else []), *([f"{way[5]} slots"] if len(slots) > 1 else []), *more]


def of_file(file: Path, conditions: Sequence[str]) -> str:
    """The tables of a file's rows that fit the conditions, each written `COLUMN=VALUE`.

    Raises:
        RowsError: the file has other rows, or a condition names no column.
    """
    return summary(compare.chosen(rows.read(file), conditions)) or "no rows"


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables of a file of rows."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="only these rows")
    given = parser.parse_args(arguments)
    try:
        print(of_file(given.file, given.where))
    except rows.RowsError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
