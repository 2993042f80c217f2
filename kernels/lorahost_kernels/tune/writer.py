"""Results as a tuned configuration file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorahost_kernels.configs import Config, ShrinkConfig
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import FORMAT, Point, TunedFile, read
from lorahost_kernels.tuned.shape import ModelShape
from lorahost_kernels.tuned.tiles import tiles

FAMILIES = ("moe", "moe_fused", "dense")
FIELDS = {
    ("shrink", "pair"): ("block_k", "split_k", "ranks", "num_warps"),
    ("shrink", "list"): ("block_m", "block_k", "split_k", "num_warps", "num_stages"),
    ("expand", "pair"): ("block_n", "steps", "num_warps"),
    ("expand", "list"): ("block_m", "block_n", "steps", "num_warps", "num_stages"),
    ("fused", "pair"): ("block_n", "num_warps"),
    ("fused", "list"): ("block_m", "block_n", "steps", "num_warps", "num_stages"),
}
FUSED = ("expand_swiglu", "expand_topk_sum")
# Switches are written where they differ from these.
SWITCHES = {
    "group": 1, "atomic": False, "prefetch": False, "pdl": True, "masks": False, "specialize": False, "fused_add": True,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Tiles of one operation and its time alone, microseconds, with the defaults and with them."""

    config: Config
    before_us: float
    after_us: float


@dataclass(frozen=True)
class Result:
    """One tuned point; rows by (module or nothing, operation); times of the whole family in microseconds.

    passes: which pass over the points it was visited in last; confirmed: whether its times are of a second process.
    Neither is in the file.
    """

    family: str
    adapters: int
    rank: int
    tokens: int
    before_us: float
    after_us: float
    rows: Mapping[tuple[str, str], Row] = field(default_factory=dict)
    passes: int = 1
    confirmed: bool = False

    @property
    def place(self) -> Place:
        """The point."""
        return Place(self.family, self.tokens, self.adapters, self.rank)

    @property
    def block_m(self) -> int | None:
        """Rows per tile of its work list; None: no list."""
        config = next(iter(self.rows.values())).config
        return config.block_m if config.mode == "list" else None


def results_of(file: TunedFile) -> list[Result]:
    """A file's points, those that were measured last at the end."""
    found: list[tuple[str, Point]] = [(family, p) for family in FAMILIES for p in getattr(file, family)]
    return [
        Result(
            family,
            p.adapters,
            p.rank,
            p.tokens,
            p.before_us,
            p.after_us,
            {key: Row(tiles(row.config), row.before_us, row.after_us) for key, row in p.rows().items()},
        )
        for family, p in sorted(found, key=lambda f: f[1].run)
    ]


def tiles_json(operation: str, config: Config) -> dict[str, Any]:
    """The fields that the operation reads in its mode; switches only where they are not as usual."""
    half = "shrink" if isinstance(config, ShrinkConfig) else "fused" if operation in FUSED else "expand"
    out: dict[str, Any] = {"mode": config.mode}
    out |= {name: getattr(config, name) for name in FIELDS[half, config.mode]}
    ignored = ("prefetch",) if config.mode == "pair" else ()
    for name, usual in SWITCHES.items():
        if name not in ignored and getattr(config, name, usual) != usual:
            out[name] = getattr(config, name)
    return out


def row_json(operation: str, row: Row) -> dict[str, Any]:
    """A row of the file."""
    times = {"before_us": round(row.before_us, 2), "after_us": round(row.after_us, 2)}
    return {"config": tiles_json(operation, row.config), **times}


def point_json(result: Result, run: int) -> dict[str, Any]:
    """A point of the file."""
    head: dict[str, Any] = {"run": run, "adapters": result.adapters, "rank": result.rank, "tokens": result.tokens}
    head |= {"before_us": round(result.before_us, 2), "after_us": round(result.after_us, 2)}
    if result.family != "dense":
        return {**head, **{op: row_json(op, row) for (_, op), row in result.rows.items()}}
    modules: dict[str, Any] = {}
    for (module, op), row in result.rows.items():
        modules.setdefault(module, {})[op] = row_json(op, row)
    return {**head, "modules": modules}


def merged(
    old: dict[str, Any] | None, shape: ModelShape, gpu: str, run: dict[str, str], results: list[Result]
) -> dict[str, Any]:
    """The file's content: old points that were not measured again, and the new ones.

    Raises:
        ConfigError: the old file is of another GPU or shape.
    """
    modules = {name: {"k": m.k, "outs": list(m.outs)} for name, m in shape.modules.items()}
    out: dict[str, Any] = {"format": FORMAT, "gpu": gpu, "model": shape.name}
    if shape.moe:
        names = ("experts", "topk", "hidden", "intermediate", "slices")
        out["experts"] = {name: getattr(shape.moe, name) for name in names}
    out["modules"] = modules
    old = old or {}
    for key in ("gpu", "experts", "modules"):
        if old and old.get(key) != out.get(key):
            raise ConfigError(f"the file is of another {key}: {old.get(key)!r}, not {out.get(key)!r}")
    runs = [*old.get("runs", [])]
    if run not in runs:
        runs.append(run)
    for family in FAMILIES:
        new = [point_json(r, runs.index(run)) for r in results if r.family == family]
        places = {place(p) for p in new}
        kept = [p for p in old.get(family, []) if place(p) not in places]
        out[family] = sorted([*kept, *new], key=place)
    if not out["moe_fused"]:
        del out["moe_fused"]
    used = sorted({p["run"] for family in FAMILIES for p in out.get(family, [])})
    for point in (p for family in FAMILIES for p in out.get(family, [])):
        point["run"] = used.index(point["run"])
    out["runs"] = [runs[i] for i in used]
    return out


def place(point: Mapping[str, Any]) -> tuple[int, int, int]:
    """What a point is known by."""
    return point["adapters"], point["rank"], point["tokens"]


def text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that errors and changes name one."""
    order = ("format", "gpu", "model", "experts", "modules", "runs")
    lines = [f" {json.dumps(key)}: {json.dumps(content[key])}" for key in order if key in content]
    for family in filter(content.__contains__, FAMILIES):
        points = ",\n".join(point_text(p) for p in content[family])
        lines.append(f' "{family}": [\n{points}\n ]' if points else f' "{family}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def point_text(point: Mapping[str, Any]) -> str:
    """A point's lines."""
    head = {k: v for k, v in point.items() if not isinstance(v, dict)}
    rows = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in point.items() if k != "modules" and isinstance(v, dict)]
    if "modules" in point:
        inner = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in point["modules"].items()]
        rows = ['   "modules": {\n' + ",\n".join(inner) + "\n   }"]
    return "  {" + json.dumps(head)[1:-1] + ",\n" + ",\n".join(rows) + "\n  }"


def write(path: Path, shape: ModelShape, gpu: str, run: dict[str, str], results: list[Result]) -> None:
    """Adds results to a file, or makes it; what is written passes the schema.

    Raises:
        ConfigError: the file that is there breaks the schema, or is of another GPU or shape.
    """
    old = None
    if path.exists():
        read(path)
        old = json.loads(path.read_text(encoding="utf-8"))
    content = merged(old, shape, gpu, run, results)
    TunedFile.model_validate(content)
    replace_text(path, text(content))


def replace_text(path: Path, content: str) -> None:
    """Writes a file in one step: whoever reads it sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.write(content)
    Path(name).chmod(0o644)
    Path(name).replace(path)
