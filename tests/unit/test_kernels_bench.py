"""`bench.kernels` without a GPU: a speed-up is printed only where our outputs are right."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from bench import cases, kernels

from lorahost_kernels.tune.timing import Spread

OURS, STOCK = SimpleNamespace(name="lorahost"), SimpleNamespace(name="stock")
TIMES_US = (10.0, 30.0)
UP = f"{TIMES_US[1] / TIMES_US[0]:.2f} x"
RIGHT, WRONG = 0.0, 0.01


class Scaled:
    """Its outputs are the reference, off by a share."""

    def __init__(self, name: str, off: float) -> None:
        self.name, self.off = name, off

    def moe(self, shape: Any, gate_up: cases.Layer, down: cases.Layer) -> Callable[[], None]:
        return lambda: self.write([(gate_up, False), (down, True)])

    def dense(self, modules: Sequence[cases.Layer]) -> Callable[[], None]:
        # only the last module is wrong: one is enough
        return lambda: self.write([(m, True) for m in modules], first_wrong=len(modules) - 1)

    def write(self, layers: Sequence[tuple[cases.Layer, bool]], first_wrong: int = 0) -> None:
        for i, (layer, down) in enumerate(layers):
            layer.y.copy_(kernels.reference(layer, down) * (1 + self.off * (i >= first_wrong)))


def results(error: float, theirs: float = 0.0) -> list[kernels.Result]:
    both = zip(TIMES_US, (error, theirs), strict=True)
    return [kernels.Result(Spread(time, time, time), found) for time, found in both]


@pytest.mark.parametrize("error", [kernels.LIMIT, 0.3, math.inf, math.nan])
def test_no_speed_up_where_our_result_is_wrong(error: float) -> None:
    said = kernels.line("moe", results(error), (OURS, STOCK))
    assert said.endswith("  RED")
    assert " x" not in said


def test_the_speed_up_where_our_result_is_right() -> None:
    said = kernels.line("moe", results(kernels.LIMIT * 0.99), (OURS, STOCK))
    assert said.endswith(f"  {UP}")
    assert "RED" not in said


def test_stocks_error_is_printed_and_not_held_against_us() -> None:
    said = kernels.line("moe", results(1e-3, theirs=0.25), (OURS, STOCK))
    assert "stock      30.0 (30.0-30.0) err 2.5e-01" in said
    assert said.endswith(f"  {UP}")


def test_our_failure_is_red_with_its_message() -> None:
    failed = kernels.Result(None, math.nan, "ValueError: no such shape")
    said = kernels.line("moe", [failed, results(0.0)[1]], (OURS, STOCK))
    assert "ValueError: no such shape" in said
    assert said.endswith("  RED")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One small shape of each kind; each provider has its own of TIMES_US, in the first turn half, then double."""
    moe = cases.MoeShape(experts=2, topk=2, hidden=16, intermediate=8, slices=2, rank=4)
    monkeypatch.setattr(cases, "MOE", {"small": moe})
    monkeypatch.setattr(cases, "DENSE", {"small": cases.DenseShape({"qkv": (16, (8, 8)), "o": (8, (16,))}, rank=4)})
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels, "DTYPE", torch.float32)
    times = iter([time * turn for _ in ("moe", "dense") for turn in (0.5, 2.0, 1.0) for time in TIMES_US])
    monkeypatch.setattr(kernels, "graph_us", lambda calls: Spread(*[next(times)] * 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    yield
    assert next(times, None) is None


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("off", "ended"), [(RIGHT, 0), (WRONG, 1)])
def test_one_run(
    off: float, ended: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed tables, the exit status, and the rows: times and errors, never a quotient of times."""
    monkeypatch.setattr(kernels, "Ours", lambda: Scaled("lorahost", off))
    monkeypatch.setattr(kernels, "Stock", lambda: Scaled("stock", RIGHT))
    table = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["kernels", "--stock", "--m", "3", "--adapters", "2", "--csv", str(table)])
    assert kernels.main() == ended
    said = [line for line in capsys.readouterr().out.splitlines() if " small M=3 adapters=2" in line]
    assert [line.split()[0] for line in said] == ["moe", "dense"]
    assert [line.endswith("  RED") for line in said] == [off == WRONG] * 2
    assert [UP in line for line in said] == [off == RIGHT] * 2
    with table.open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(row["kernel"], row["provider"], row["metric"]) for row in rows] == [
        (kind, name, metric) for kind in ("moe", "dense") for name in ("lorahost", "stock")
        for metric in ("time", "error")
    ]  # fmt: skip
    assert [float(row["p50"]) for row in rows if row["metric"] == "time"] == [*TIMES_US * 2]
    for row in rows:
        if row["metric"] == "error":
            wrong_by = off if row["provider"] == "lorahost" else RIGHT
            assert float(row["p50"]) == pytest.approx(wrong_by, abs=1e-6)
