"""Where a run of the tuner begins: from the files in use, the most similar model's points last."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.kernels.tuned_simulated import Clock, Simulated, spaces_of, tuner

from lorahost_kernels.tune import plan, shipped, writer
from lorahost_kernels.tune.known import Choice, Known, choice_of
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.space import groupings
from lorahost_kernels.tuned.load import folder
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import KNOWN

GPU = "NVIDIA H200"
QWEN = KNOWN["qwen3-32b"]
SHIPPED = Path(__file__).parents[2] / "tuned_configs"


def test_the_shipped_rows_of_the_model_are_its_own() -> None:
    own, others = shipped.starts(GPU, QWEN, {}, pytest.fail)
    assert own == writer.results_of(read(SHIPPED / "NVIDIA_H200" / "qwen3-32b.json"))
    assert len(others) > len(own)


def test_gate_and_up_in_one_tensor_are_another_shape() -> None:
    shape = KNOWN["gpt-oss-20b"]
    assert shape.moe is not None
    two = replace(shape, moe=replace(shape.moe, slices=2))
    assert shipped.starts(GPU, shape, {}, pytest.fail)[0] != []
    assert shipped.starts(GPU, two, {}, pytest.fail)[0] == []


def test_similar_models_come_after_others(tmp_path: Path) -> None:
    text = json.loads((SHIPPED / "NVIDIA_H200" / "gpt-oss-20b.json").read_text())
    where = tmp_path / "NVIDIA_H200"
    where.mkdir()
    # the name of a file says nothing
    for name, model in (("a", "gpt-oss-20b"), ("b", "qwen3-30b-a3b")):
        (where / f"{name}.json").write_text((SHIPPED / "NVIDIA_H200" / f"{model}.json").read_text())
    large = KNOWN["gpt-oss-120b"]
    counts = {m: len(writer.results_of(read(where / f"{f}.json"))) for f, m in (("a", "gpt"), ("b", "qwen"))}
    own, found = shipped.starts(GPU, large, {"LORAHOST_CONFIG_DIR": str(tmp_path)}, pytest.fail)
    assert own == []
    assert len(found) == sum(counts.values())
    assert found[-counts["gpt"] :] == writer.results_of(read(where / "a.json"))
    assert shipped.starts("NVIDIA H100", large, {"LORAHOST_CONFIG_DIR": str(tmp_path)}, pytest.fail) == ([], [])
    text["gpu"] = "NVIDIA H100"
    (where / "a.json").write_text(json.dumps(text))
    assert len(shipped.starts(GPU, large, {"LORAHOST_CONFIG_DIR": str(tmp_path)}, pytest.fail)[1]) == counts["qwen"]


def test_a_broken_file_is_said_and_left_out(tmp_path: Path) -> None:
    where = tmp_path / "NVIDIA_H200"
    where.mkdir()
    (where / "x.json").write_text('{"format": 2}')
    said: list[str] = []
    assert shipped.starts(GPU, QWEN, {"LORAHOST_CONFIG_DIR": str(tmp_path)}, said.append) == ([], [])
    assert len(said) == 1
    assert said[0].startswith("no start from x.json: ")


def test_nothing_is_in_use_where_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped.load, "folder", lambda environ: None)
    assert folder({}) is not None
    assert shipped.starts(GPU, QWEN, {}, pytest.fail) == ([], [])


def test_a_start_is_timed_at_its_point_and_beats_a_worse_one() -> None:
    """What another run found is where this one begins, and the last that was learned for a point counts."""
    clock, place = Clock(), Place("moe", 16)
    found, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces_of(place), clock), 1e9)
    assert found is not None
    first = next(iter(found.rows))
    worse = replace(
        found,
        rows={**found.rows, first: replace(found.rows[first], config=replace(found.rows[first].config, num_warps=8))},
    )
    second, bench = tuner(clock)[0], Simulated(place, spaces_of(place), clock)
    for result in (worse, found):
        second.learn(result)
    # no time for more than what it begins with
    again, _ = second.tune_place(place, bench, clock())
    assert again is not None
    assert choice_of(again) == choice_of(found)


class Misleading(Simulated):
    """Product by product the tiles in use are slower than what a descent finds; the whole layer says otherwise."""

    used: Choice
    used_us, found_us, default_us = 90.0, 95.0, 100.0
    right_alone = True

    def turns(self, choices: Sequence[Choice]) -> list[list[float]]:
        default = {name: space.default(None) for name, space in self.spaces.items()}
        times = {True: self.used_us, False: self.found_us}
        return [[self.default_us if c == default else times[c == self.used]] * 5 for c in choices]

    def right(self, choice: Choice) -> bool:
        return super().right(choice) and (self.right_alone or choice != self.used)


@pytest.fixture
def misled() -> tuple[Misleading, writer.Result, writer.Result]:
    """A bench, what a descent finds there, and another result, whose tiles are in use."""
    clock, place = Clock(), Place("dense", 16)
    spaces = spaces_of(place)
    found, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces, clock), 1e9)
    assert found is not None
    key = next(iter(found.rows))
    other = replace(found.rows[key].config, num_warps=8 if found.rows[key].config.num_warps < 8 else 4)
    used = replace(found, rows={**found.rows, key: replace(found.rows[key], config=other)})
    bench = Misleading(place, spaces, clock)
    bench.used = choice_of(used)
    return bench, found, used


def tuned_again(bench: Misleading, *known: writer.Result) -> tuple[Choice, float, float]:
    """(tiles, the defaults' time, theirs) of a run that knows results."""
    run, _ = tuner(bench.clock)
    for result in known:
        run.learn(result)
    result, _ = run.tune_place(bench.place, bench, 1e9)
    assert result is not None
    return choice_of(result), result.before_us, result.after_us


def test_what_is_in_use_goes_only_for_what_is_faster_in_turns_with_it(
    misled: tuple[Misleading, writer.Result, writer.Result],
) -> None:
    bench, found, used = misled
    assert tuned_again(bench) == (choice_of(found), 100.0, 95.0)
    assert tuned_again(bench, used) == (choice_of(used), 100.0, 90.0)
    # an engine takes the first file's point
    assert tuned_again(bench, used, found) == (choice_of(used), 100.0, 90.0)


@pytest.mark.parametrize(("used_us", "found_us"), [(99.2, 98.5), (99.5, 99.4), (101.0, 95.0)])
def test_what_is_in_use_and_no_better_than_the_defaults_costs_no_gain(
    misled: tuple[Misleading, writer.Result, writer.Result], used_us: float, found_us: float
) -> None:
    bench, _, used = misled
    bench.used_us, bench.found_us = used_us, found_us
    assert tuned_again(bench, used) == tuned_again(bench)


@pytest.mark.parametrize("runs", [True, False])
def test_what_is_in_use_and_wrong_here_costs_no_gain(
    misled: tuple[Misleading, writer.Result, writer.Result], runs: bool
) -> None:
    bench, found, used = misled
    if runs:
        bench.right_alone = False
    else:
        bench.wrong = {pair for name, pair in choice_of(used).items() if pair != choice_of(found)[name]}
    assert tuned_again(bench, used) == (choice_of(found), 100.0, 95.0)


def test_another_models_tiles_displace_none_of_the_models_own() -> None:
    known, key = Known(), ("qkv", None)
    own, others = shipped.starts(GPU, QWEN, {}, pytest.fail)
    place = plan.Place("dense", 16, 8, 32)
    space = plan.spaces(QWEN, place, 227 * 1024, 132)["qkv"]
    for result in own:
        known.learn(result)
    before = known.near(place, key, space, 2)
    for result in others:
        known.learn(result, other=True)
    assert known.near(place, key, space, 2) == before
    assert len(known.near(place, key, space, 1, other=True)) == 1


def test_the_last_that_was_learned_of_other_models_counts() -> None:
    known, place = Known(), plan.Place("dense", 16, 8, 32)
    _, others = shipped.starts(GPU, KNOWN["gpt-oss-120b"], {}, pytest.fail)
    for result in others:
        known.learn(result, other=True)
    space = plan.spaces(KNOWN["gpt-oss-120b"], place, 227 * 1024, 132)["qkv"]
    like = next(r for r in writer.results_of(read(SHIPPED / "NVIDIA_H200" / "gpt-oss-20b.json")) if r.place == place)
    assert like.block_m is None
    assert known.near(place, ("qkv", None), space, 1, other=True) == [choice_of(like)["qkv"]]


@pytest.mark.parametrize("model", KNOWN)
def test_any_models_tiles_are_a_start_for_any_other(model: str) -> None:
    """What runs there has neighbours; what can't run there is left out."""
    shape, known, used = KNOWN[model], Known(), 0
    own, others = shipped.starts(GPU, shape, {}, pytest.fail)
    for result in (*own, *others):
        known.learn(result, other=result in others)
    for place in plan.places(shape, [1, 64, 2048], plan.families_of(shape), [8], [16, 32]):
        for name, space in plan.spaces(shape, place, 227 * 1024, 132).items():
            for way in groupings(space.pairs, space.groups, place.rank):
                near = known.near(place, (name, way), space, 2)
                for pair in (*near, *known.near(place, (name, way), space, 1, other=True)):
                    used += 1
                    assert all(space.allowed(other) for _, other in space.neighbours(pair))
    assert used > 10
