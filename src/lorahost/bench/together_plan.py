"""Which engines run together on one GPU and what they are asked; standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lorahost.bench import rows, steps
from lorahost.bench.loads import Load
from lorahost.bench.point import SPEC_ALPHABET, EnginePath, Point
from lorahost.bench.point import Spec as Speculation
from lorahost.bench.rows import Row
from lorahost.bench.turns import row_point

TOGETHER: tuple[EnginePath, ...] = ("base", "stock", "ours", "ours-tuned")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]*")


@dataclass(frozen=True)
class Spec:
    """One engine."""

    name: str
    point: Point

    @property
    def file_name(self) -> str:
        """The name for files and folders."""
        return re.sub("[:@]", "-", self.name)


@dataclass(frozen=True)
class Job:
    """One load, for the adapters or for the base model of an engine."""

    load: Load
    base: bool = False

    def __str__(self) -> str:
        return f"{self.load}{', base traffic' if self.base else ''}"


@dataclass(frozen=True)
class Turn:
    """All repeats of a job on an engine in one round."""

    round: int
    job: Job
    spec: Spec

    @property
    def point(self) -> Point:
        """What its rows say that it is."""
        return replace(row_point(self.spec.point, self.job.base, self.round), loads=(self.job.load,))


def specs(
    point: Point,
    paths: str,
    extras: Mapping[str, Mapping[str, Any]],
    slots: Mapping[str, int] = MappingProxyType({}),
    speculation: Mapping[str, Speculation] = MappingProxyType({}),
) -> list[Spec]:
    """Engines of `[NAME=]PATH[:BACKEND][@http]`, separated by commas; with @http through a server of their own.

    Args:
        point: What is the same for all; its loads are all that are asked.
        paths: See above; without NAME an engine is called as it is written.
        extras: Engine arguments of single engines, by name.
        slots: Numbers of slots of single engines, by name.
        speculation: Speculative decoding of single engines, by name.

    Raises:
        ValueError: an unknown path, a name twice, arguments for no engine, or two engines that nothing tells apart.
    """
    found: dict[str, Spec] = {}
    for text in paths.split(","):
        name, one = _spec(point, text.strip())
        if name in found:
            raise ValueError(f"paths: {name!r} is there twice; give one another name: NAME=PATH")
        extra = {**point.extra, **extras.get(name, {})}
        spec = speculation.get(name, one.spec)
        alphabet = one.alphabet or (SPEC_ALPHABET if spec == "synthetic" else 0)
        one = replace(one, extra=extra, slots=slots.get(name, one.slots), spec=spec, alphabet=alphabet)
        found[name] = Spec(name, one)
    named: dict[str, Mapping[str, object]] = {"extra-of": extras, "slots-of": slots, "spec-of": speculation}
    for option, names in named.items():
        if unknown := sorted(names.keys() - found.keys()):
            raise ValueError(f"{option} {unknown[0]!r}: no engine of this name; there are {', '.join(found)}")
    _tell_apart(list(found.values()))
    return list(found.values())


def _spec(point: Point, text: str) -> tuple[str, Point]:
    """Name and point of one engine as it is written."""
    label, separator, rest = text.rpartition("=")
    engine, _, via = rest.partition("@")
    path, _, backend = engine.partition(":")
    name = label if separator else rest
    chosen = next((known for known in TOGETHER if known == path), None)
    if chosen is None or via != "http" * ("@" in rest) or not NAME.fullmatch(name):
        raise ValueError(f"paths {text!r}: must be [NAME=]PATH[:BACKEND][@http] with a path of {', '.join(TOGETHER)}")
    return name, replace(point, path=chosen, moe_backend=backend or point.moe_backend, via="http" if via else "engine")


def _tell_apart(engines: Sequence[Spec]) -> None:
    rows_like: dict[object, str] = {}
    files: dict[str, str] = {}
    for spec in engines:
        if (other := rows_like.setdefault(tuple(spec.point.row().items()), spec.name)) != spec.name:
            raise ValueError(f"paths: nothing in their rows would tell {other!r} and {spec.name!r} apart")
        if (other := files.setdefault(spec.file_name, spec.name)) != spec.name:
            raise ValueError(f"paths: {other!r} and {spec.name!r} would have one log, {spec.file_name}.log")


def turns(engines: Sequence[Spec], jobs: Sequence[Job], rounds: int) -> list[Turn]:
    """Every job on every engine, so many rounds; every second round backwards, so that a drift meets all alike.

    A turn whose rows would be another's is left out: base traffic of `base` is its own traffic, that of `ours-tuned`
    is that of `ours`.
    """
    found = []
    for number in range(1, rounds + 1):
        for job in jobs:
            order = [Turn(number, job, spec) for spec in owners(engines, jobs, job)]
            found += order if number % 2 else order[::-1]
    return found


def owners(engines: Sequence[Spec], jobs: Sequence[Job], job: Job) -> list[Spec]:
    """The engines that are asked a job."""
    seen: set[object] = set()
    found: list[Spec] = []
    for one in jobs:
        for spec in engines:
            key = identity(spec, one)
            if key not in seen and one == job:
                found.append(spec)
            seen.add(key)
    return found


def identity(spec: Spec, job: Job) -> tuple[str, ...]:
    """What the rows of a job on an engine have in common in every round."""
    row = Turn(0, job, spec).point.row()
    return (*(rows.cell(row[key]) for key in steps.KEYS if key != "alternation"), str(job.load), spec.point.commit)


def rows_of(found: Sequence[Row], spec: Spec, job: Job) -> list[Row]:
    """The rows of a job on an engine."""
    wanted = identity(spec, job)
    keys = [key for key in steps.KEYS if key != "alternation"]
    return [row for row in found if (*(row[key] for key in keys), row["load"], row["commit"]) == wanted]


def done(turn: Turn, found: Sequence[Row]) -> bool:
    """Whether the file has all repeats of a turn from one engine start, at this commit."""
    return steps.done(turn.point, [row for row in found if row["commit"] == turn.point.commit])
