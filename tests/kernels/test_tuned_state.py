"""What a run of the tuner leaves: a state that the next run goes on from, a file that the schema takes, a summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.kernels.tuned_simulated import SHAPE, Clock, Simulated, spaces_of, tuner

from lorahost_kernels.tune import estimate, writer
from lorahost_kernels.tune.plan import Place
from lorahost_kernels.tune.run import summary
from lorahost_kernels.tune.state import State, StateError
from lorahost_kernels.tune.writer import Result
from lorahost_kernels.tuned.lines import ConfigError
from lorahost_kernels.tuned.schema import read
from lorahost_kernels.tuned.shape import KNOWN


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    key = {"gpu": "g", "rank": 32}
    state = State(tmp_path / "x.state", key)
    clock = Clock()
    todo = [Place("moe", 16), Place("dense", 16), Place("moe", 32)]

    def stopping(result: Result) -> None:
        state.add(result)
        if len(state.results) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner(clock)[0].tune(todo, lambda p: Simulated(p, spaces_of(p), clock), 1e9, stopping)
    again = State(tmp_path / "x.state", key)
    assert again.results == state.results
    missing = todo[2:]
    assert [r.place for r in again.results] == todo[:2]
    # what was found before is where the neighbour begins
    tuned = tuner(clock)[0]
    for result in again.results:
        tuned.resume(result)
    bench, opened = Simulated(missing[0], spaces_of(missing[0]), clock), list[Place]()

    def opening(place: Place) -> Simulated:
        opened.append(place)
        return bench if place == missing[0] else Simulated(place, spaces_of(place), clock)

    assert tuned.tune(todo, opening, 1e9, again.add) == []
    assert opened[0] == missing[0]
    old = state.results[0].rows
    assert bench.measured[1] == (old["", "gate_up_shrink"].config, old["", "gate_up_expand"].config)
    again.finish()
    assert State(tmp_path / "x.state", key).results == []


def test_another_runs_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    clock = Clock()
    place = Place("moe", 16)
    result, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces_of(place), clock), 1e9)
    assert result is not None
    State(path, {"gpu": "a", "rank": 32}).add(result)
    with pytest.raises(StateError, match=r"x\.state is of a run with rank=32, not 16; remove .* to begin anew"):
        State(path, {"gpu": "a", "rank": 16})
    for text in ("", "[]", '{"key": {}, "results": [{}]}', '{"results": []}'):
        path.write_text(text)
        with pytest.raises(StateError, match="is no state of the tuner"):
            State(path, {"gpu": "a"})


def results() -> list[Result]:
    clock = Clock()
    out = []
    for place in (Place("moe", 16), Place("moe", 1024), Place("dense", 16), Place("dense", 1024)):
        result, _ = tuner(clock)[0].tune_place(place, Simulated(place, spaces_of(place), clock), 1e9)
        assert result is not None
        out.append(result)
    return out


def test_what_is_written_passes_the_schema_and_a_second_run_adds(tmp_path: Path) -> None:
    path = tmp_path / "GPU" / "m.json"
    run = {"driver": "1", "torch": "2", "triton": "3", "git_revision": "a", "date": "2026-11-29", "mix": "m"}
    found = results()
    writer.write(path, SHAPE, "GPU", run, found[:2])
    assert [p.tokens for p in read(path).moe] == [16, 1024]
    again = writer.results_of(read(path))
    assert [r.rows["", "down_shrink"].config for r in again] == [r.rows["", "down_shrink"].config for r in found[:2]]
    later = {**run, "git_revision": "b"}
    newer = replace(found[0], after_us=found[0].after_us / 2)
    writer.write(path, SHAPE, "GPU", later, [newer, *found[2:], replace(found[0], rank=16)])
    file = read(path)
    assert [(p.rank, p.tokens, file.runs[p.run].git_revision) for p in file.moe] == [
        (16, 16, "b"), (32, 16, "b"), (32, 1024, "a"),
    ]  # fmt: skip
    assert file.moe[1].after_us == round(newer.after_us, 2)
    assert [p.tokens for p in file.dense] == [16, 1024]
    # when the last point of a run is replaced, the run goes
    writer.write(path, SHAPE, "GPU", later, [found[1]])
    assert [r.git_revision for r in read(path).runs] == ["b"]
    assert len(path.read_text().splitlines()) < 80
    with pytest.raises(ConfigError, match="of another gpu: 'GPU', not 'other'"):
        writer.write(path, SHAPE, "other", run, found)
    with pytest.raises(ConfigError, match="of another experts"):
        writer.write(path, KNOWN["gpt-oss-120b"], "GPU", run, found)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="Field required"):
        writer.write(path, SHAPE, "GPU", run, found)


def test_fused_points_are_written_read_and_kept_in_the_state(tmp_path: Path) -> None:
    clock, found = Clock(), []
    for place in (Place("moe_fused", 16), Place("moe_fused", 1024), Place("moe", 16)):
        bench = Simulated(place, spaces_of(place), clock)
        bench.best_way = 16 if place.tokens > 16 else None
        result, _ = tuner(clock)[0].tune_place(place, bench, 1e9)
        assert result is not None
        found.append(result)
    assert [r.block_m is None for r in found] == [True, False, True]
    path = tmp_path / "m.json"
    run = {"driver": "1", "torch": "2", "triton": "3", "git_revision": "a", "date": "2026-11-29", "mix": "m"}
    writer.write(path, SHAPE, "GPU", run, found)
    again = {r.place: r for r in writer.results_of(read(path))}
    for result in found:
        kept = again[result.place].rows
        assert {key: row.config for key, row in kept.items()} == {key: row.config for key, row in result.rows.items()}
    state = State(tmp_path / "x.state", {})
    for result in found:
        state.add(result)
    assert State(tmp_path / "x.state", {}).results == found
    # an engine's experts are of one family: plain ones are not counted besides
    assert estimate.table(SHAPE, found, 4.3e12) == estimate.table(SHAPE, found[:2], 4.3e12)


def test_estimate_and_summary_say_before_and_after() -> None:
    found = results()
    text = estimate.table(SHAPE, found, 4.3e12)
    assert len(text.splitlines()) == 3
    assert "(one family only)" in estimate.table(SHAPE, found[:1], 4.3e12)
    # GPT-OSS-20B at 16 tokens: nearly all experts, 11 GB of MXFP4 at most
    assert 9e9 < estimate.base_bytes(SHAPE, 16) < 13.5e9
    assert estimate.base_bytes(SHAPE, 1) < 4e9
    assert f"{found[0].before_us:.1f} -> {found[0].after_us:.1f} us" in summary(found[0])
