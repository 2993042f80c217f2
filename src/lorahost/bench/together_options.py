"""Options of engines that are measured together, the same for both command lines; standard library only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lorahost.bench.loads import Load
from lorahost.bench.point import SPECS, Spec


@dataclass(frozen=True)
class Option:
    """One of them: a name with dashes, the default, which is its type, too, and the help."""

    name: str
    default: str | int | float | bool | tuple[str, ...]
    help: str
    metavar: str | None = None


OPTIONS = (
    Option(
        "paths", "base,stock,ours,ours-tuned", "Engines; with @http through the server.",
        "[NAME=]PATH[:BACKEND][@http],...",
    ),
    Option("base-loads", "closed:16", "Base model's traffic on LoRA engines; '' for none.", "closed:N,..."),
    Option("kv-bytes", 2.5e9, "Bytes of an engine's KV cache."),
    Option("utilization", 0.2, "Share of the GPU that must be free when an engine starts."),
    Option("extra-of", (), "Engine arguments of one engine; may be repeated.", "NAME=JSON"),
    Option("slots-of", (), "Slots of one engine instead of --slots; may be repeated.", "NAME=N"),
    Option("spec-of", (), "Speculation of one engine instead of --spec; may be repeated.", "NAME=none|ngram|synthetic"),
    Option("start-limit", 420.0, "Seconds until all must be ready; those that are not are given up."),
    Option("limit", 1800.0, "Seconds after which all are stopped; rows are kept."),
    Option("logs", "", "Folder of the engines' logs; '' for logs/ in the work folder.", "DIR"),
    Option("probe", False, "Compare answers with those of --reference before measuring."),
    Option("reference", "stock", "The engine whose answers are right.", "NAME"),
    Option("profile", False, "After measuring, say where a decode step's time goes under the first closed load."),
)  # fmt: skip
# what two servers with a fixed plan need of them
ROOM = ("kv-bytes", "utilization", "start-limit", "limit", "logs")


@dataclass(frozen=True)
class Options:
    """The values; times in seconds."""

    paths: str
    base_loads: tuple[Load, ...]
    kv_bytes: int
    utilization: float
    extra_of: Mapping[str, Mapping[str, Any]]
    slots_of: Mapping[str, int]
    spec_of: Mapping[str, Spec]
    start_limit: float
    limit: float
    logs: Path | None
    probe: bool
    reference: str
    profile: bool
    alternations: int
    out: Path
    work: Path | None

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "start_limit", "limit", "alternations"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name.replace('_', '-')} {getattr(self, name)}: must be above 0")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization {self.utilization}: must be above 0 and at most 1")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From a command line's values by name; others are left out.

        Raises:
            ValueError: a value is impossible; the message names the option.
        """
        mine = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        mine["base_loads"] = tuple(Load.parse(text) for text in given["base_loads"].split(",") if text)
        mine["kv_bytes"] = int(given["kv_bytes"])
        mine["extra_of"] = dict(_extra(text) for text in given["extra_of"])
        mine["slots_of"] = dict(_slots(text) for text in given["slots_of"])
        mine["spec_of"] = dict(_speculation(text) for text in given["spec_of"])
        mine["logs"] = Path(given["logs"]) if given["logs"] else None
        return cls(**mine)


def _extra(text: str) -> tuple[str, dict[str, Any]]:
    name, separator, value = text.partition("={")
    try:
        if not separator:
            raise ValueError("no ={")
        return name, json.loads("{" + value)
    except ValueError as error:
        raise ValueError(f"extra-of {text!r}: must be NAME=JSON with a JSON object ({error})") from error


def _slots(text: str) -> tuple[str, int]:
    name, separator, value = text.rpartition("=")
    if not separator or not value.isdecimal() or int(value) < 1:
        raise ValueError(f"slots-of {text!r}: must be NAME=N with N >= 1")
    return name, int(value)


def _speculation(text: str) -> tuple[str, Spec]:
    name, _, value = text.rpartition("=")
    chosen = next((known for known in SPECS if known == value), None)
    if not name or chosen is None:
        raise ValueError(f"spec-of {text!r}: must be NAME=METHOD with a method of {', '.join(SPECS)}")
    return name, chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, and --alternations, for argparse."""
    parser.add_argument("--alternations", type=int, default=3, help="rounds in which all are measured in turn")
    for option in OPTIONS:
        flag, text = f"--{option.name}", option.help.replace("%", "%%")
        if isinstance(option.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(option.default, tuple):
            parser.add_argument(flag, action="append", default=[], metavar=option.metavar, help=text)
        else:
            kind = type(option.default)
            parser.add_argument(flag, type=kind, default=option.default, metavar=option.metavar, help=text)


def click_arguments(option: Option) -> dict[str, Any]:
    """Keywords of click.option."""
    if isinstance(option.default, bool):
        return {"is_flag": True, "help": option.help}
    if isinstance(option.default, tuple):
        return {"multiple": True, "metavar": option.metavar, "help": option.help}
    default = option.default
    return {
        "type": type(default),
        "default": default,
        "show_default": True,
        "metavar": option.metavar,
        "help": option.help,
    }
