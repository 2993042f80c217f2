"""Brings a tuned file in line with what another process measured: a row that does not hold there is not kept.

python -m bench.settle FILE ROWS.csv [--other OTHER | --new OTHER] [--rev REV]

ROWS.csv is of `bench.tuned`, in a process that did not tune. Alone it held FILE against the defaults: a point that was
slower beyond the noise gets the defaults. With --other it held OTHER against FILE (`--against`): other tiles that were
faster there by more than the noise and 1 % are taken over with their run. With --new it held OTHER against the
defaults: a point that FILE lacks is taken over unless it was slower beyond the noise. Points without a row stay as they
are.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.tuned import AGAINST
from lorahost_kernels.configs import PROGRAMS
from lorahost_kernels.tune import plan
from lorahost_kernels.tune.known import GAIN
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.space import groupings, halves_of
from lorahost_kernels.tune.writer import FAMILIES, Result, Row, place, point_json, replace_text, text
from lorahost_kernels.tuned.schema import TunedFile, read
from lorahost_kernels.tuned.shape import ModelShape

SHARED = 227 * 1024  # bytes that one program may have on an H200
Content = dict[str, Any]


def default_point(shape: ModelShape, where: Place, old: Mapping[str, Any]) -> Content:
    """The point with the defaults' tiles, of the same run and with the defaults' time in place of its own."""
    spaces = plan.spaces(shape, where, SHARED, PROGRAMS)
    first = next(iter(spaces.values()))
    usual = groupings(first.pairs, first.groups, where.rank)[0]
    rows: dict[tuple[str, str], Row] = {}
    for name, space in spaces.items():
        pair = space.default(usual)
        for op, (_, config) in zip(plan.operations(where.family, name, pair[0].mode), halves_of(pair), strict=True):
            key = (name if where.family == "dense" else "", op)
            before = before_us(old, key)
            rows[key] = Row(config, before, before)
    whole = old["before_us"]
    result = Result(where.family, where.adapters, where.rank, where.tokens, whole, whole, rows)
    return point_json(result, old["run"])


def before_us(point: Mapping[str, Any], key: tuple[str, str]) -> float:
    """The defaults' time of one row. Raises ValueError where the point's own tiles need another operation."""
    module, op = key
    rows = point["modules"][module] if module else point
    if op not in rows:
        where = f"{point['adapters']}x{point['rank']} M={point['tokens']}"
        raise ValueError(f"{where}: no time of {op} with the defaults, tune the point again")
    return float(rows[op]["before_us"])


def settle(content: Content, shape: ModelShape, rows: list[dict[str, str]], other: Content | None) -> list[str]:
    """Changes `content` as the module says; a line for each point that was changed.

    Raises:
        ValueError: rows of something else than is asked for, or a point that should get the defaults and can't.
    """
    changed, seen = [], set[Place]()
    for row in rows:
        where = place_of(row)
        first, second, noise = (float(row[name]) for name in ("default_us", "tuned_us", "noise"))
        index = index_of(content, where)
        if row["model"] != content["model"] or index is None:
            continue
        check(row, where, content["gpu"], other is not None)
        once(where, seen)
        points = content[where.family]
        if other is None:
            if second <= first * (1 + max(noise, GAIN)):
                continue
            points[index] = default_point(shape, where, points[index])
            changed.append(f"{where}: defaults, {first:.1f} us and not {second:.1f}")
            continue
        its = index_of(other, where)
        if its is None or second >= first * (1 - max(noise, GAIN)):
            continue
        if tiles_of(points[index]) == tiles_of(other[where.family][its]):
            continue
        points[index] = taken_over(content, other, other[where.family][its])
        changed.append(f"{where}: {second:.1f} us and not {first:.1f}")
    drop_unused_runs(content)
    return changed


def add(content: Content, rows: list[dict[str, str]], other: Content) -> list[str]:
    """Adds points of `other` that `content` lacks; a line for each. Raises ValueError for rows of something else."""
    added, seen = [], set[Place]()
    has = {Place(family, p["tokens"], p["adapters"], p["rank"]) for family in FAMILIES for p in content.get(family, [])}
    for row in rows:
        where = place_of(row)
        its = index_of(other, where)
        if row["model"] != content["model"] or its is None or where in has:
            continue
        check(row, where, content["gpu"], False)
        once(where, seen)
        before, after, noise = (float(row[name]) for name in ("default_us", "tuned_us", "noise"))
        if after > before * (1 + max(noise, GAIN)):
            continue
        content.setdefault(where.family, []).append(taken_over(content, other, other[where.family][its]))
        added.append(f"{where}: new, {before:.1f} -> {after:.1f} us")
    for family in FAMILIES:
        content.get(family, []).sort(key=place)
    return added


def tiles_of(point: Content) -> dict[tuple[str, str], Any]:
    """A point's configurations by module ("" for experts) and operation."""
    parts = point.get("modules", {"": point})
    return {
        (module, op): row["config"]
        for module, part in parts.items()
        for op, row in part.items()
        if isinstance(row, dict) and "config" in row
    }


def taken_over(content: Content, other: Content, point: Content) -> Content:
    """A point of another file for this one, which gets its run."""
    run = other["runs"][point["run"]]
    if run not in content["runs"]:
        content["runs"].append(run)
    return {**point, "run": content["runs"].index(run)}


def check(row: Mapping[str, str], where: Place, gpu: str, against: bool) -> None:
    """Raises ValueError for a row of another GPU, or of another comparison."""
    if row["gpu"] != gpu:
        raise ValueError(f"{where}: measured on {row['gpu']}, the file is for {gpu}")
    if (row["source"] == AGAINST) != against:
        raise ValueError(f"{where}: held against {'another file' if not against else 'the defaults'}, see --other")


def place_of(row: Mapping[str, str]) -> Place:
    """The point of a row."""
    return Place(row["family"], int(row["tokens"]), int(row["adapters"]), int(row["rank"]))


def once(where: Place, seen: set[Place]) -> None:
    """Notes a point. Raises ValueError for one that had a row before."""
    if where in seen:
        raise ValueError(f"{where}: two rows; name one run with --rev")
    seen.add(where)


def drop_unused_runs(content: Content) -> None:
    """Leaves the runs that a point is of."""
    points = [p for family in FAMILIES for p in content.get(family, [])]
    used = sorted({p["run"] for p in points})
    for point in points:
        point["run"] = used.index(point["run"])
    content["runs"] = [content["runs"][i] for i in used]


def index_of(content: Content, where: Place) -> int | None:
    """Where a file's content has a point."""
    wanted = (where.adapters, where.rank, where.tokens)
    return next((i for i, p in enumerate(content.get(where.family, [])) if place(p) == wanted), None)


def main() -> int:
    """Rewrites FILE and prints what was changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--rev", help="only rows of this git_rev")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--other", type=Path, metavar="OTHER", help="the file that ROWS.csv held against FILE")
    which.add_argument("--new", type=Path, metavar="OTHER", help="the file that ROWS.csv held against the defaults")
    args = parser.parse_args()
    file = read(args.file)
    shape = ModelShape(file.model, file.moe_shape, file.module_shapes())
    content = json.loads(args.file.read_text())
    other = None
    if path := args.other or args.new:
        of = read(path)
        if (of.gpu, of.experts, of.modules) != (file.gpu, file.experts, file.modules):
            print(f"{path} is of another GPU or shape", file=sys.stderr)
            return 1
        other = json.loads(path.read_text())
    try:
        with args.rows.open(newline="") as f:
            rows = [row for row in csv.DictReader(f) if args.rev in (None, row["git_rev"])]
        changed = add(content, rows, other) if args.new else settle(content, shape, rows, other)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    TunedFile.model_validate(content)
    if changed:
        replace_text(args.file, text(content))
    print("\n".join([*changed, f"{len(changed)} points changed"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
