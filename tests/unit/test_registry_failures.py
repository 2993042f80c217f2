"""What the registry does when a source, an import, the engine or a caller is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.registry_world import SETTINGS, Report, World, digest, fails, world_test

from lorahost.adapters import events
from lorahost.adapters.registry import AdapterRegistry
from lorahost.errors import AdapterRejectedError, HostError, InvalidRequestError


@pytest.mark.parametrize("stage", ["fetch", "import", "load"])
def test_a_failed_swap_keeps_the_old_version(stage: str, tmp_path: Path) -> None:
    @world_test()
    async def run(w: World) -> None:
        await w.registry.register("a", "v1")
        fault = AdapterRejectedError("rank 99 is over 64", code="rank")
        if stage == "load":
            w.engine.faults[digest("v2")] = fault
        else:
            w.tools.faults[stage, "v2"] = fault
        await fails(AdapterRejectedError, w.registry.register("a", "v2"), "rank 99")
        await w.quiet()
        record = w.registry.get("a")
        assert (record.state, record.digest, record.src) == ("ready", digest("v1"), "v1")
        assert record.last_error == "rank 99 is over 64"
        assert await w.serving("a") == digest("v1")
        assert list(w.engine.held) == [1]
        assert len(w.files()) == 1

    run(tmp_path)


@world_test()
async def test_a_failed_first_registration_stays_listed_and_says_why(w: World) -> None:
    w.engine.faults[digest("v1")] = AdapterRejectedError("engine says no", code="refused")
    await fails(AdapterRejectedError, w.registry.register("a", "v1"), "engine says no")
    record = w.registry.get("a")
    assert (record.state, record.reason, record.loaded) == ("failed", "engine says no", False)
    error = await fails(AdapterRejectedError, w.registry.acquire("a"), "'a' can't be served: engine says no")
    assert (error.status, error.code) == (424, "refused")
    await w.quiet()
    assert (w.engine.held, w.files()) == ({}, [])
    w.engine.faults.clear()
    assert (await w.registry.register("a", "v1")).state == "ready"
    assert w.engine.seen_ids == [1, 2]
    assert w.registry.get("a").reason is None


@world_test()
async def test_an_unexpected_failure_is_an_error_with_its_text(w: World) -> None:
    w.tools.faults["import", "v1"] = OSError(28, "No space left on device")
    error = await fails(HostError, w.registry.register("a", "v1"), "No space left on device")
    assert (error.status, error.code) == (500, "adapter_load_failed")
    assert w.registry.get("a").state == "failed"


@world_test()
async def test_other_modules_than_imported_are_refused(w: World) -> None:
    w.engine.modules_of = lambda version: frozenset({"layers.0.attn", "layers.9.router"})
    error = await fails(AdapterRejectedError, w.registry.register("a", "v1"), "layers.0.experts")
    assert error.code == "modules_mismatch"
    assert error.details["missing_in_engine"] == ["layers.0.experts"]
    assert error.details["only_in_engine"] == ["layers.9.router"]
    assert w.engine.held == {}


@world_test()
async def test_no_module_at_all_is_refused(w: World) -> None:
    w.tools.report = Report(modules=frozenset())
    await fails(AdapterRejectedError, w.registry.register("a", "v1"), "0 modules")
    assert w.engine.held == {}


@world_test(probe="warn")
async def test_no_effect_warns(w: World) -> None:
    w.engine.without_effect.add(digest("v1"))
    record = await w.registry.register("a", "v1")
    assert len(record.warnings) == 1
    assert "does not change" in record.warnings[0]
    assert [e.message for e in w.events if isinstance(e, events.Warned)] == list(record.warnings)
    await w.registry.register("b", "v2")
    assert w.registry.get("b").warnings == ()
    assert w.engine.base_probes == 1


@world_test(probe="refuse")
async def test_no_effect_is_refused(w: World) -> None:
    w.engine.without_effect.add(digest("v1"))
    error = await fails(AdapterRejectedError, w.registry.register("a", "v1"), "does not change")
    assert (error.code, w.engine.held) == ("no_effect_on_probe", {})


@world_test(probe="off")
async def test_the_probe_can_be_off(w: World) -> None:
    w.engine.without_effect.add(digest("v1"))
    assert (await w.registry.register("a", "v1")).warnings == ()
    assert w.engine.base_probes == 0


@world_test()
async def test_a_lazy_load_that_the_engine_refuses(w: World) -> None:
    await w.registry.register("a", "v1", preload=False)
    w.engine.faults[digest("v1")] = AdapterRejectedError("engine says no")
    results = await asyncio.gather(*[w.registry.acquire("a") for _ in range(3)], return_exceptions=True)
    assert {type(r) for r in results} == {AdapterRejectedError}
    record = w.registry.get("a")
    assert (record.state, record.reason, record.in_flight) == ("failed", "engine says no", 0)
    await fails(AdapterRejectedError, w.registry.acquire("a"), "can't be served")
    assert (w.engine.seen_ids, w.engine.held) == ([1], {})
    w.engine.faults.clear()
    await w.registry.register("a", "v1", preload=False)
    assert await w.serving("a") == digest("v1")


@world_test()
async def test_bad_parameters(w: World) -> None:
    for name, src, options, param in [
        ("", "v1", {}, "name"),
        (" ", "v1", {}, "name"),
        ("a\n", "v1", {}, "name"),
        ("a" * 513, "v1", {}, "name"),
        (None, "v1", {}, "name"),
        ("a", "", {}, "src"),
        ("a", 3, {}, "src"),
        ("a", "v1", {"alias": ""}, "alias"),
        ("a", "v1", {"preload": False, "pin": True}, "pin"),
    ]:
        error = await fails(InvalidRequestError, w.registry.register(name, src, **options), param)
        assert (error.param, error.status) == (param, 400)
    assert w.registry.list() == ([], None)


@world_test(reserved=frozenset({"base"}))
async def test_the_base_models_name_is_taken(w: World) -> None:
    await fails(InvalidRequestError, w.registry.register("base", "v1"), "base model's")


@world_test()
async def test_a_source_that_changes_while_it_is_read(w: World) -> None:
    local = w.root / "local"
    local.mkdir()
    (local / "adapter_config.json").write_text("v1")
    tools = replace(w.tools.bundle(), fetch=lambda src, into: local)
    registry = AdapterRegistry(w.engine, tools, replace(SETTINGS, work_dir=w.root / "work"))
    assert (await registry.register("a", "local")).digest == digest("v1")

    def import_(source: Path, target: Path) -> Report:
        report = w.tools.import_(source, target)
        (local / "adapter_config.json").write_text("v3")
        return report

    (local / "adapter_config.json").write_text("v2")
    tools = replace(tools, import_=import_)
    registry = AdapterRegistry(w.engine, tools, replace(SETTINGS, work_dir=w.root / "work2"))
    error = await fails(AdapterRejectedError, registry.register("a", "local"), "changed while being read")
    assert error.code == "source_changed"


@world_test()
async def test_an_observer_that_fails_changes_nothing(w: World) -> None:
    def observer(event: events.AdapterEvent) -> None:
        raise RuntimeError("observer")

    settings = replace(SETTINGS, work_dir=w.root / "other")
    registry = AdapterRegistry(w.engine, w.tools.bundle(), settings, on_event=observer)
    assert (await registry.register("a", "v1")).state == "ready"
