"""`bench.settle`: a tuned file after another process has measured it."""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import settle
from bench.tuned import COLUMNS

from lorahost_kernels.configs import default_block_m
from lorahost_kernels.tuned.schema import read

SHIPPED = Path(__file__).parents[2] / "tuned_configs" / "NVIDIA_H200"
RUN = {
    "driver": "1", "torch": "2", "triton": "3", "git_revision": "other", "date": "2026-01-01", "mix": "mixed",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(SHIPPED / "qwen3-32b.json", tmp_path / "own.json"))


def rows(path: Path, *measured: tuple[int, int, float, float, float], **more: str) -> Path:
    """Rows of dense points of 8 adapters: rank, tokens, first, second, noise."""
    common = {"model": "qwen3-32b", "family": "dense", "adapters": 8, "source": "exact", "gpu": "NVIDIA H200"}
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        for rank, tokens, first, second, noise in measured:
            own = {"rank": rank, "tokens": tokens, "default_us": first, "tuned_us": second, "noise": noise}
            writer.writerow({**common, **own, **more})
    return path


def point(path: Path, rank: int, tokens: int, family: str = "dense") -> dict[str, Any]:
    content = json.loads(path.read_text())
    found = content[family][settle.index_of(content, settle.Place(family, tokens, 8, rank))]
    return {**found, "run": content["runs"][found["run"]]}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["settle", *map(str, arguments)])
    return settle.main()


def test_a_point_that_was_slower_gets_the_defaults(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads(file.read_text())
    slower = rows(tmp_path / "r.csv", (32, 64, 50.0, 52.0, 0.01), (32, 16, 40.0, 41.0, 0.03), (16, 64, 40.0, 30.0, 0.0))
    was = point(file, 32, 64)
    assert was["after_us"] < was["before_us"]
    assert run(monkeypatch, file, slower) == 0
    now = point(file, 32, 64)
    assert (now["before_us"], now["after_us"], now["run"]) == (was["before_us"], was["before_us"], was["run"])
    block_m = default_block_m(64, 8, 32)
    for name, module in now["modules"].items():
        for op, row in module.items():
            assert row["before_us"] == row["after_us"] == was["modules"][name][op]["before_us"]
            assert row["config"]["mode"] == ("pair" if block_m is None else "list")
    after = json.loads(file.read_text())
    changed = [a for a, b in zip(after["dense"], before["dense"], strict=True) if a != b]
    assert [(p["rank"], p["tokens"]) for p in changed] == [(32, 64)], "noise, and what was faster, change nothing"
    assert read(file).model == "qwen3-32b"


def test_a_point_that_was_faster_is_taken_over_with_its_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.json"
    content = json.loads(file.read_text())
    content["runs"] = [RUN]
    for p in content["dense"]:
        p["run"], p["after_us"] = 0, 1.0
        if (p["rank"], p["tokens"]) != (32, 8):
            shrink = p["modules"]["o"]["shrink"]["config"]
            shrink["num_warps"] = 4 if shrink["num_warps"] == 8 else 8
    other.write_text(json.dumps(content))
    measured = rows(
        tmp_path / "r.csv",
        (32, 64, 50.0, 45.0, 0.0),
        (32, 8, 50.0, 45.0, 0.0),
        (16, 64, 50.0, 49.7, 0.0),
        (16, 1, 9.0, 8.0, 0.2),
        source="against",
    )
    assert run(monkeypatch, file, measured, "--other", other) == 0
    assert (point(file, 32, 64)["after_us"], point(file, 32, 64)["run"]) == (1.0, RUN)
    # noise, no row, and the same tiles
    for rank, tokens in ((16, 64), (16, 1), (32, 16), (32, 8)):
        assert point(file, rank, tokens)["run"] != RUN
        assert point(file, rank, tokens)["after_us"] > 1.0
    # all of them: the runs that no point is of are gone
    every = [(p["rank"], p["tokens"], 9.0, 8.0, 0.0) for p in content["dense"] if p["adapters"] == 8]
    run(monkeypatch, file, rows(tmp_path / "r.csv", *every, source="against"), "--other", other)
    content = json.loads(file.read_text())
    assert {p["run"] for p in content["dense"]} == set(range(len(content["runs"])))


def test_a_point_that_the_file_lacks_is_added_unless_it_was_slower(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.json"
    content = json.loads(file.read_text())
    other.write_text(json.dumps({**content, "runs": [RUN] * len(content["runs"])}))
    gone = {(8, 32, 16), (8, 32, 64), (8, 16, 1)}
    kept = {**content, "dense": [p for p in content["dense"] if settle.place(p) not in gone]}
    file.write_text(json.dumps(kept))
    measured = rows(
        tmp_path / "r.csv",
        (32, 16, 40.0, 38.0, 0.0), (32, 64, 50.0, 52.0, 0.01), (16, 1, 15.0, 15.1, 0.0), (32, 1, 18.0, 1.0, 0.0),
    )  # fmt: skip
    has = point(file, 32, 1)
    assert run(monkeypatch, file, measured, "--new", other) == 0
    content = json.loads(file.read_text())
    assert {settle.place(p) for p in content["dense"]} == {settle.place(p) for p in kept["dense"]} | {
        (8, 32, 16), (8, 16, 1),
    }  # fmt: skip
    assert [settle.place(p) for p in content["dense"]] == sorted(map(settle.place, content["dense"]))
    assert point(file, 32, 16)["run"] == point(file, 16, 1)["run"] == RUN
    assert point(file, 32, 1) == has, "a point of the file stays as it is"
    read(file)
    file.write_text(json.dumps(kept))
    twice = rows(tmp_path / "r.csv", (32, 16, 40.0, 38.0, 0.0), (32, 16, 40.0, 44.0, 0.0))
    assert run(monkeypatch, file, twice, "--new", other) == 1
    assert json.loads(file.read_text()) == kept, "which of two rows holds is not guessed"


def test_another_shapes_file_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rows(tmp_path / "r.csv", (32, 64, 50.0, 45.0, 0.0))
    assert run(monkeypatch, file, measured, "--other", SHIPPED / "gpt-oss-20b.json") == 1
    assert file.read_text() == (SHIPPED / "qwen3-32b.json").read_text()


def test_rows_of_another_model_change_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rows(tmp_path / "r.csv", (32, 64, 50.0, 60.0, 0.0), model="qwen3-30b-a3b")
    assert run(monkeypatch, file, measured) == 0
    assert file.read_text() == (SHIPPED / "qwen3-32b.json").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"source": "against"}, "8x32 M=64: held against another file"),
        ({"gpu": "NVIDIA H100"}, "8x32 M=64: measured on NVIDIA H100, the file is for NVIDIA H200"),
    ],
)
def test_rows_of_something_else_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    more: dict[str, str], said: str,
) -> None:  # fmt: skip
    assert run(monkeypatch, file, rows(tmp_path / "r.csv", (32, 64, 50.0, 60.0, 0.0), **more)) == 1
    assert said in capsys.readouterr().err
    assert file.read_text() == (SHIPPED / "qwen3-32b.json").read_text()


def test_one_run_is_named_where_there_are_two(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = rows(tmp_path / "r.csv", (32, 64, 50.0, 60.0, 0.0), git_rev="a").read_text()
    two = rows(tmp_path / "r.csv", (32, 64, 50.0, 40.0, 0.0), git_rev="b").read_text()
    (tmp_path / "r.csv").write_text(one + two.splitlines()[1] + "\n")
    assert run(monkeypatch, file, tmp_path / "r.csv") == 1
    assert "two rows; name one run with --rev" in capsys.readouterr().err
    assert run(monkeypatch, file, tmp_path / "r.csv", "--rev", "b") == 0
    assert file.read_text() == (SHIPPED / "qwen3-32b.json").read_text()
    assert run(monkeypatch, file, tmp_path / "r.csv", "--rev", "a") == 0
    assert file.read_text() != (SHIPPED / "qwen3-32b.json").read_text()


def test_a_time_that_was_never_measured_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"adapters": 8, "rank": 32, "tokens": 64, "run": 0, "before_us": 9.0, "gate_up_shrink": {"before_us": 4.0}}
    assert settle.before_us(old, ("", "gate_up_shrink")) == 4.0
    with pytest.raises(ValueError, match="8x32 M=64: no time of down_expand with the defaults"):
        settle.before_us(old, ("", "down_expand"))
