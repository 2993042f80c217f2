from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.bench_rows import write

from lorahost.bench import chart, floor, rows
from lorahost.bench.point import EnginePath, Point
from lorahost.bench.shapes import SHAPES
from lorahost.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
VALUES: dict[EnginePath, list[float]] = {"base": [200, 210], "stock": [99, 101], "ours": [150], "ours-tuned": [160]}


def measured(path: Path, *paths: EnginePath) -> Path:
    return write(path, *((Point(p), VALUES[p], f"r-{p}") for p in paths))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "chart", *map(str, arguments)])


def ids(svg: Path) -> list[str]:
    return [element.attrib["id"] for element in ElementTree.parse(svg).iter() if "id" in element.attrib]


def texts(svg: Path) -> str:
    return " ".join(ElementTree.parse(svg).getroot().itertext())


def test_the_chart_has_four_bars_a_panel_and_the_floor(tmp_path: Path) -> None:
    file = measured(tmp_path / "rows.csv", "base", "stock", "ours", "ours-tuned")
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    ran = invoke(file, "--out", svg, "--out", png)
    assert ran.exit_code == 0, ran.output
    found = ids(svg)
    assert [found.count(f"bar-{path}") for path in VALUES] == [2, 2, 2, 2]
    assert found.count("byte-floor") == 1
    assert "not measured" not in texts(svg)
    for said in ("output tokens per second", "time to first token, ms", "NVIDIA H200", "abc1234", "random weights"):
        assert said in texts(svg)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "| LoRA, stock vLLM | 100.0 (99.0 to 101.0) | 49% |" in ran.output


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    file = measured(tmp_path / "rows.csv", "base", "stock")
    for name in ("a", "b"):
        assert invoke(file, "--out", tmp_path / f"{name}.svg", "--out", tmp_path / f"{name}.png").exit_code == 0
    for suffix in ("svg", "png"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_what_was_not_measured_is_named_and_has_no_bar(tmp_path: Path) -> None:
    file = measured(tmp_path / "rows.csv", "base", "stock", "ours")
    ran = invoke(file, "--out", tmp_path / "a.svg")
    found = ids(tmp_path / "a.svg")
    assert "bar-ours-tuned" not in found
    assert texts(tmp_path / "a.svg").count("not measured") == 2
    assert "| LoRA, lorahost, as shipped (tuned tiles) | not measured | - | not measured | - | 0 |" in ran.output


def test_without_the_engine_without_lora_there_is_no_floor_and_no_share(tmp_path: Path) -> None:
    file = measured(tmp_path / "rows.csv", "stock", "ours")
    ran = invoke(file, "--out", tmp_path / "a.svg")
    assert "byte-floor" not in ids(tmp_path / "a.svg")
    assert "| LoRA, stock vLLM | 100.0 (99.0 to 101.0) | - |" in ran.output


@pytest.mark.parametrize("metric", ["otps_p50", "ttft_p50_ms"])
def test_bars_are_medians_with_their_range(tmp_path: Path, metric: str) -> None:
    found = {bar.path: bar for bar in chart.bars(rows.read(measured(tmp_path / "rows.csv", "base")), metric)}
    low, high = sorted(v if metric == "otps_p50" else 1e5 / v for v in VALUES["base"])
    figure = found["base"].figure
    assert (figure.low, figure.high) == pytest.approx((low, high), rel=1e-4)
    # of an even number, the middle of the two in the middle
    assert figure.value == pytest.approx((low + high) / 2, rel=1e-4)
    assert not found["stock"].measured


def test_a_stalled_round_is_a_bar_s_line_not_its_height(tmp_path: Path) -> None:
    values = {"base": [20.0, 200.0, 202.0, 204.0], "ours": [150.0, 150.0, 152.0, 152.0]}
    for number in range(4):
        for path in ("base", "ours"):
            write(tmp_path / "rows.csv", (Point(path, alternation=number + 1), [values[path][number]], f"r-{path}"))
    ran = invoke(tmp_path / "rows.csv", "--out", tmp_path / "a.svg")
    assert "| no LoRA | 201.0 (20.0 to 204.0) | 100% |" in ran.output
    assert "built-in tiles | 151.0 (150.0 to 152.0) | 75% |" in ran.output
    assert "Bars: median of 4 repeats of 1 engine start each; lines: smallest and largest" in texts(tmp_path / "a.svg")
    # the bar's line in the drawing goes from the stalled round to the largest
    [base, *_] = chart.bars(chart.selected(rows.read(tmp_path / "rows.csv"), []), "ttft_p50_ms")
    assert (base.figure.low, base.figure.high) == pytest.approx((1e5 / 204, 1e5 / 20), rel=1e-4)


def test_the_readme_s_chart_is_that_of_the_rows(tmp_path: Path) -> None:
    assert invoke(RESULTS / "retention_spread.csv", "--out", tmp_path / "a.svg").exit_code == 0
    assert texts(ROOT / "docs" / "retention.svg") == texts(tmp_path / "a.svg")
    assert "docs/retention.svg" in (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / "retention.svg").stat().st_size < 60_000
    assert (ROOT / "docs" / "retention.png").stat().st_size < 80_000


def test_rows_that_are_not_one_point_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.csv", (Point("base"), [1], "a"), (Point("stock", rank=16), [1], "b"))
    assert "several points: rank is ['16', '32']" in invoke(file, "--out", tmp_path / "a.svg").output
    assert invoke(file, "--out", tmp_path / "a.svg", "--where", "rank=16").exit_code == 0
    two = write(tmp_path / "two.csv", *((Point("stock", moe_backend=b), [1], b) for b in ("marlin", "triton")))
    assert "several moe_backend ['marlin', 'triton']" in invoke(two, "--out", tmp_path / "a.svg").output
    assert "written as .svg or .png" in invoke(two, "--out", tmp_path / "a.gif", "--where", "moe_backend=triton").output
    assert "no row of the four paths" in invoke(file, "--out", tmp_path / "a.svg", "--where", "rank=1").output


def test_the_byte_floor_of_gpt_oss_20b() -> None:
    shape = SHAPES["gpt-oss-20b"]
    # two draws of four experts: 7.5 of 32 are touched on average, 0.9216 MB each for both projections
    experts = floor.lora_bytes(shape, 24, 32, ("experts",), 8, 16)
    assert experts == pytest.approx(24 * 8 * 32 * (1 - (31 / 32) ** 8) * 921_600)
    attention = floor.lora_bytes(shape, 24, 32, ("attention",), 8, 16)
    sides = (2880 + 4096) + 2 * (2880 + 512) + (4096 + 2880)
    assert attention == 24 * 8 * sides * 32 * 2
    assert floor.otps_limit(250, experts, 4.3e12) == pytest.approx(1 / (1 / 250 + experts / 4.3e12))
    # one expert of a 2D model: gate and up with an A of their own
    one = floor.lora_bytes(SHAPES["qwen3-30b-a3b"], 1, 32, ("experts",), 1, 1)
    assert one == pytest.approx(128 * (1 - (127 / 128) ** 8) * 540_672)
