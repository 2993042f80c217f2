"""Points out of the files that vLLM reads from VLLM_TUNED_CONFIG_FOLDER.

Same names and nesting: slots, slices, tokens, k, n and, for experts, the intermediate size; keys are numbers as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorahost_kernels.configs import (
    Config,
    ExpandConfig,
    ShrinkConfig,
    block_r,
    default_block_m,
    expand_config,
    shrink_config,
)
from lorahost_kernels.tuned import legal
from lorahost_kernels.tuned.lines import ConfigError, parse
from lorahost_kernels.tuned.table import Family, RowKey, Table, TablePoint, dense_row, moe_rows, near

VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
# file name after the GPU's -> operation
FILES = {
    "FUSED_MOE_LORA_W13_SHRINK": "gate_up_shrink",
    "FUSED_MOE_LORA_W13_EXPAND": "gate_up_expand",
    "FUSED_MOE_LORA_W2_SHRINK": "down_shrink",
    "FUSED_MOE_LORA_W2_EXPAND": "down_expand",
    "SHRINK": "shrink",
    "EXPAND_TRUE": "expand",
}
NAMES = {"BLOCK_M": "BLOCK_SIZE_M", "BLOCK_N": "BLOCK_SIZE_N", "BLOCK_K": "BLOCK_SIZE_K"}
LEVEL_KEYS = {*NAMES, *(n.lower() for n in NAMES), *NAMES.values(), "NUM_WARPS", "num_warps", "SPLIT_K", "split_k"}
# vLLM's dense kernels need all of these; its MoE kernels none
DENSE_KEYS = {
    "shrink": {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "SPLIT_K", "NUM_WARPS", "NUM_STAGES", "NUM_CTAS"},
    "expand": {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "NUM_WARPS", "NUM_STAGES", "NUM_CTAS"},
}
# Our partial sums are stored side by side: more parts than these cost more than they bring, and memory.
MOST_PARTS = 8
MOST_SUMS = 64 * 2**20
MOST_WARNINGS = 20
POWERS = {"BLOCK_SIZE_M": (16, 256), "BLOCK_SIZE_N": (16, 512), "BLOCK_SIZE_K": (16, 512), "NUM_WARPS": (1, 16)}
RANGES = {"NUM_STAGES": (1, 8), "SPLIT_K": (1, 256), "GROUP_SIZE_M": (1, 64), "NUM_CTAS": (1, 16), "MAX_NREG": (1, 255)}


@dataclass(frozen=True)
class Leaf:
    """One entry of a file; where names file and keys."""

    operation: str
    adapters: int
    slices: int
    tokens: int
    rank: int
    hidden: int
    intermediate: int
    values: dict[str, int]
    where: str


def add(table: Table, folder: str) -> list[str]:
    """Adds what a folder has for the table's GPU, model and slots; returns what was wrong, file and key named."""
    wrong: list[str] = []
    prefix = table.gpu.replace(" ", "_").replace("-", "_")
    if not Path(folder).is_dir():
        return [f"{VARIABLE}={folder} is no directory"]
    leaves: list[Leaf] = []
    for name, operation in FILES.items():
        path = Path(folder) / f"{prefix}_{name}.json"
        if path.is_file():
            leaves += read(path, operation, wrong)
    groups: dict[tuple[Family, int, int, int], dict[RowKey, Leaf]] = {}
    for leaf in leaves:
        family: Family = "dense" if leaf.operation in DENSE_KEYS else "moe"
        for key in keys_of(table, leaf):
            groups.setdefault((family, leaf.adapters, leaf.rank, leaf.tokens), {})[key] = leaf
    small = 0
    for (family, *sizes), rows in groups.items():
        try:
            point = convert(table, family, (sizes[0], sizes[1], sizes[2]), rows)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if point is None:
            small += 1
        else:
            table.families[family].add([point])
    if small:
        wrong.append(f"{folder}: {small} points are of batches that need no work list here, and keep the defaults")
    return wrong[:MOST_WARNINGS] + ([f"and {len(wrong) - MOST_WARNINGS} more"] if len(wrong) > MOST_WARNINGS else [])


def read(path: Path, operation: str, wrong: list[str]) -> list[Leaf]:
    """The entries of a file; what can't be used goes to `wrong`."""
    try:
        value, _ = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        wrong.append(str(error) if isinstance(error, ConfigError) else f"{path}: {error}")
        return []
    moe = operation not in DENSE_KEYS
    found = []
    for keys, leaf in walk(value, 6 if moe else 5, (), str(path), wrong):
        where = f"{path}: {'.'.join(map(str, keys))}"
        try:
            values = values_of(leaf, operation, where)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        slots, slices, tokens, k, n = keys[:5]
        rank, hidden = (n, k) if operation == "shrink" else (k, n)
        # vLLM's dense kernels count the base model as one more adapter
        adapters = slots if moe else slots - 1
        if adapters > 0:
            found.append(Leaf(operation, adapters, slices, tokens, rank, hidden, keys[5] if moe else 0, values, where))
    return found


def walk(
    value: Any, depth: int, keys: tuple[int, ...], where: str, wrong: list[str]
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(keys, entry) of each entry below `depth` levels of numbers."""
    place = f"{where}: {'.'.join(map(str, keys)) or 'top level'}"
    if depth == 0:
        yield keys, value
        return
    if not isinstance(value, dict):
        wrong.append(f"{place}: want an object with numbers as keys, {depth} more levels deep")
        return
    for key, inner in value.items():
        if key.isascii() and key.isdigit() and 0 < int(key) < 2**31:
            yield from walk(inner, depth - 1, (*keys, int(key)), where, wrong)
        elif key in LEVEL_KEYS:
            wrong.append(f"{place}: {key!r} is there where numbers are expected, {depth} levels are missing")
            return
        elif keys or not isinstance(inner, str):  # a note such as triton_version may stand on top
            wrong.append(f"{place}: key {key!r} is no positive number")


def values_of(leaf: Any, operation: str, where: str) -> dict[str, int]:
    """An entry's values by their upper-case names. Raises ConfigError."""
    if not isinstance(leaf, dict):
        raise ConfigError(f"{where}: want an object, got {leaf!r:.40}")
    values: dict[str, int] = {}
    for key, value in leaf.items():
        name = NAMES.get(key.upper(), key.upper())
        if name not in POWERS and name not in RANGES:
            raise ConfigError(f"{where}: unknown key {key!r}")
        if value is None and name == "MAX_NREG":
            continue
        low, high = POWERS.get(name) or RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{where}: {key}={value!r:.40} is no whole number from {low} to {high}")
        if name in POWERS and value & (value - 1):
            raise ConfigError(f"{where}: {key}={value} is no power of two")
        values[name] = value
    missing = sorted(DENSE_KEYS.get(operation, set()) - set(values))
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    return values


def keys_of(table: Table, leaf: Leaf) -> list[RowKey]:
    """The rows of the table's model that an entry is for."""
    moe = table.shape.moe
    if leaf.operation in DENSE_KEYS:
        return [
            dense_row(m, leaf.operation)
            for m in table.shape.modules.values()
            if len(m.outs) == leaf.slices and leaf.hidden == (m.k if leaf.operation == "shrink" else max(m.outs))
        ]
    if moe is None:
        return []
    first = leaf.operation.startswith("gate_up")
    slices, intermediate = (moe.slices, moe.gate_up_width) if first else (1, moe.intermediate)
    fits = leaf.slices == slices and near(leaf.hidden, moe.hidden) and near(leaf.intermediate, intermediate)
    return [moe_rows(moe)[leaf.operation]] if fits else []


def convert(table: Table, family: Family, sizes: tuple[int, int, int], rows: dict[RowKey, Leaf]) -> TablePoint | None:
    """A point in our tiles; None for a batch that needs no work list. Raises ConfigError."""
    adapters, rank, tokens = sizes
    experts = table.shape.moe.experts if family == "moe" and table.shape.moe else 1
    pairs, groups = tokens * table.topk(family), adapters * experts
    default = default_block_m(pairs, groups, rank)
    if default is None:
        return None
    given = {leaf.values["BLOCK_SIZE_M"]: leaf.where for leaf in rows.values() if "BLOCK_SIZE_M" in leaf.values}
    if len(given) > 1 and family == "moe":
        text = "; ".join(f"{m} in {where}" for m, where in given.items())
        raise ConfigError(f"BLOCK_SIZE_M must be one in the files of W13 and W2: {text}")
    most = 64 if block_r(rank) <= 64 else 32
    # dense files may disagree, since vLLM's dense kernels group for themselves; ours share one list
    block_m = min(next(iter(given)), most) if len(given) == 1 else default
    tiles: dict[RowKey, Config] = {}
    for key, leaf in rows.items():
        operation, columns = key
        at = (pairs, groups, rank, columns[0], len(columns), block_m)
        config = to_shrink(leaf, shrink_config(*at), pairs) if operation.endswith("shrink") else None
        tiles[key] = config or to_expand(leaf, expand_config(*at))
        if not legal.fits_registers(tiles[key], rank):
            raise ConfigError(f"{leaf.where}: tiles of {leaf.values} are too large or too small for our kernels")
    return TablePoint(adapters, rank, tokens, tiles, f"{VARIABLE}, {len(rows)} operations")


def to_shrink(leaf: Leaf, default: ShrinkConfig, pairs: int) -> ShrinkConfig:
    """A shrink's tiles; what the entry doesn't say is the default's."""
    v = leaf.values
    parts = min(v.get("SPLIT_K", default.split_k), MOST_PARTS)
    if pairs * leaf.slices * leaf.rank * 4 * parts > MOST_SUMS:
        parts = default.split_k
    return replace(
        default,
        block_k=v.get("BLOCK_SIZE_K", default.block_k),
        split_k=parts,
        num_warps=v.get("NUM_WARPS", default.num_warps),
        num_stages=v.get("NUM_STAGES", default.num_stages),
    )


def to_expand(leaf: Leaf, default: ExpandConfig) -> ExpandConfig:
    """An expand's tiles; 64 rows a tile are safe with 2 warps only, see `legal`."""
    v = leaf.values
    warps = v.get("NUM_WARPS", default.num_warps)
    return replace(
        default,
        block_n=v.get("BLOCK_SIZE_N", default.block_n),
        num_warps=min(warps, 2) if default.block_m >= 64 else warps,
        num_stages=v.get("NUM_STAGES", default.num_stages),
        group=v.get("GROUP_SIZE_M", default.group),
    )
