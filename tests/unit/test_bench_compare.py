from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.bench_rows import write, written

from lorahost.bench import compare, rows
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.cli import main


def drawn(mean: float, seed: int, starts: int = 5, repeats: int = 4) -> compare.Runs:
    rng = random.Random(seed)
    return [[mean * offset * rng.gauss(1, 0.01) for _ in range(repeats)] for offset in (rng.gauss(1, 0.01),) * starts]


def test_a_known_ratio_lies_in_its_interval_and_is_told_from_one() -> None:
    found = compare.ratio("otps_p50", drawn(100, 1), drawn(120, 2))
    assert found.low < 1.2 < found.high
    assert found.low < found.value < found.high
    assert found.differs
    assert found.verdict == f"{(found.value - 1) * 100:+.1f} %"


def test_the_same_distribution_is_mostly_no_difference() -> None:
    rng = random.Random(7)

    def side() -> compare.Runs:
        return [[100 * rng.gauss(1, 0.02) for _ in range(3)] for _ in range(5)]

    same = [compare.ratio("otps_p50", side(), side(), seed) for seed in range(12)]
    assert sum(not r.differs for r in same) >= 9
    assert {r.verdict for r in same if not r.differs} == {"no difference"}


def test_the_interval_follows_the_spread_between_starts_not_the_number_of_repeats() -> None:
    a = [[100.0] * 50, [110.0] * 50, [120.0] * 50]
    b = [[103.0] * 50, [113.0] * 50, [123.0] * 50]
    assert not compare.ratio("otps_p50", a, b).differs
    assert compare.ratio("otps_p50", [[v for run in a for v in run]], [[v * 1.2 for run in a for v in run]]).differs


def test_a_median_is_the_middle_and_of_an_even_number_the_middle_of_two(tmp_path: Path) -> None:
    found = rows.read(write(tmp_path / "a.csv", (Point("ours"), [20, 204, 200, 202], "r1")))
    assert compare.spread(found, "otps_p50") == compare.Spread(201, 20, 204)
    assert compare.spread(found[:3], "otps_p50") == compare.Spread(200, 20, 204)
    assert not compare.spread([], "otps_p50").measured
    assert compare.spread(found, "tokens_per_step").text() == "-"


def test_medians_are_compared_over_the_rounds_that_both_have(tmp_path: Path) -> None:
    def side(name: str, *values: list[float]) -> list[rows.Row]:
        steps = ((Point("ours", alternation=i), value, name) for i, value in enumerate(values, 1))
        return rows.read(write(tmp_path / f"{name}.csv", *steps))

    stalled = side("a", [10, 98], [100, 102], [400])
    found = compare.over_rounds("otps_p50", side("b", [50, 51], [52, 53]), stalled)
    # 51.5 / 99; round by round 50.5 / 54 and 52.5 / 101
    assert found.value == pytest.approx(51.5 / 99)
    assert (found.low, found.high) == pytest.approx((52.5 / 101, 50.5 / 54))
    third = [row for row in stalled if row["alternation"] == "3"]
    assert not compare.over_rounds("otps_p50", side("c", [1]), third).measured


def test_a_stall_shows_in_the_interval_of_means() -> None:
    found = compare.ratio("otps_p50", [[20.0, 200.0, 202.0, 204.0]], [[150.0, 150.0, 152.0, 152.0]])
    assert found.value == pytest.approx(604 / 626)
    assert found.high > 1.5
    assert found.verdict == "no difference"


def test_one_start_is_said() -> None:
    found = compare.ratio("otps_p50", [[100.0, 101.0]], [[200.0, 201.0]])
    assert found.verdict.endswith("(one start)")


def test_files_are_compared_and_a_missing_difference_is_said(tmp_path: Path) -> None:
    a = write(tmp_path / "a.csv", (Point("stock"), [100, 101], "r1"), (Point("stock", alternation=2), [99, 100], "r2"))
    b = write(tmp_path / "b.csv", (Point("ours"), [150, 151], "r3"), (Point("ours", alternation=2), [149, 150], "r4"))
    ran = CliRunner().invoke(main, ["bench", "compare", str(a), str(b)])
    assert ran.exit_code == 0, ran.output
    assert "+50.0 %" in ran.output
    again = CliRunner().invoke(main, ["bench", "compare", str(a), str(a)])
    assert again.output.count("no difference") == 5  # metrics that the rows have
    assert "%" not in again.output.replace("95 %", "")


@pytest.mark.parametrize(
    ("other", "column"),
    [
        (Point("stock", input=800), "input"),
        (Point("stock", loads=(Load(concurrency=4),)), "load"),
        (Point("stock", weights="collapsed"), "weights"),
        (Point("stock", rank=16), "rank"),
    ],
)
def test_different_points_are_refused(tmp_path: Path, other: Point, column: str) -> None:
    a = write(tmp_path / "a.csv", (Point("stock"), [100], "r1"))
    b = write(tmp_path / "b.csv", (other, [100], "r2"))
    ran = CliRunner().invoke(main, ["bench", "compare", str(a), str(b)])
    assert ran.exit_code == 1
    assert f"different points are not compared: {column} is" in ran.output


def test_a_mix_of_paths_is_refused_and_can_be_chosen_from(tmp_path: Path) -> None:
    both = write(tmp_path / "a.csv", (Point("stock"), [100], "r1"), (Point("ours"), [150], "r2"))
    refused = CliRunner().invoke(main, ["bench", "compare", str(both), str(both)])
    assert refused.exit_code == 1
    assert "A mixes path ['ours', 'stock']" in refused.output
    chosen = ["bench", "compare", str(both), str(both), "--a", "path=stock", "--b", "path=ours"]
    assert "1.500" in CliRunner().invoke(main, chosen).output
    none = CliRunner().invoke(main, [*chosen[:-1], "path=nothing"])
    assert none.exit_code == 1
    assert "B has no rows" in none.output
    assert "COLUMN=VALUE" in CliRunner().invoke(main, [*chosen[:-1], "speed=1"]).output


def test_a_file_without_the_optional_columns_is_read_and_gets_them_with_its_next_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", (Point("ours"), [100.0], "r1"))
    place = {column: rows.COLUMNS.index(column) for column in rows.OPTIONAL}
    with path.open(newline="") as file:
        lines = [[cell for n, cell in enumerate(line) if n not in place.values()] for line in csv.reader(file)]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    [old] = rows.read(path)
    assert list(old) == list(rows.COLUMNS)
    assert (old["in_flight"], old["latency_mean_ms"], old["latency_p50_ms"]) == ("", "", "6000")
    rows.append(path, written(Point("ours"), [100.0], "r2", in_flight=3.9))
    first, second = rows.read(path)
    assert first == old
    assert (second["run"], second["in_flight"]) == ("r2", "3.9")
    assert path.read_text().splitlines()[0] == ",".join(rows.COLUMNS)
    # others must be there
    path.write_text(path.read_text().replace(",latency_p50_ms", "", 1))
    with pytest.raises(rows.RowsError, match=r"differing: \['latency_p50_ms'\]"):
        rows.append(path, [{}])


def test_broken_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    with pytest.raises(rows.RowsError, match=r"bad\.csv: No such file"):
        rows.read(bad)
    bad.write_text("a,b\n1,2\n")
    with pytest.raises(rows.RowsError, match=r"bad\.csv:1: the columns"):
        rows.read(bad)
    with pytest.raises(rows.RowsError, match=r"bad\.csv:1: the columns"):
        rows.append(bad, [{}])
    bad.write_text(",".join(rows.COLUMNS) + "\n1,2\n")
    with pytest.raises(rows.RowsError, match=r"bad\.csv:2: 2 cells"):
        rows.read(bad)
    with pytest.raises(rows.RowsError, match="unknown columns \\['speed'\\]"):
        rows.append(tmp_path / "new.csv", [{"speed": 1}])
