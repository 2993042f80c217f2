"""A registry with stand-ins around it, for its unit tests."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.adapter_engine import FakeAdapterEngine

from lorahost.adapters import events
from lorahost.adapters.preparation import AdapterTools
from lorahost.adapters.registry import AdapterRegistry, RegistrySettings
from lorahost.adapters.residency import EngineLimits
from lorahost.errors import HostError


@dataclass
class Report:
    rank: int = 8
    modules: frozenset[str] = frozenset({"layers.0.attn", "layers.0.experts"})
    bytes: int = 1000
    warnings: tuple[str, ...] = ()


@dataclass
class Tools:
    """Sources are texts; the text is the content, and `faults` and `held` are keyed by it."""

    contents: dict[str, str] = field(default_factory=dict)
    faults: dict[tuple[str, str], Exception] = field(default_factory=dict)
    held: dict[tuple[str, str], threading.Event] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    calls: list[str] = field(default_factory=list)

    def step(self, stage: str, key: str) -> None:
        self.calls.append(f"{stage} {key}")
        if (stage, key) in self.held:
            assert self.held[stage, key].wait(10)
        if (stage, key) in self.faults:
            raise self.faults[stage, key]

    def fetch(self, src: str, into: Path) -> Path:
        self.step("fetch", src)
        (into / "a").mkdir()
        (into / "a/adapter_config.json").write_text(self.contents.get(src, src))
        return into / "a"

    def digest_of(self, source: Path) -> str:
        return digest((source / "adapter_config.json").read_text())

    def import_(self, source: Path, target: Path) -> Report:
        content = (source / "adapter_config.json").read_text()
        self.step("import", content)
        target.mkdir()
        (target / "adapter_config.json").write_text(content)
        return self.report

    def bundle(self) -> AdapterTools:
        return AdapterTools(self.fetch, self.digest_of, self.import_)


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"never came true; running: {asyncio.all_tasks()}")


@dataclass
class World:
    engine: FakeAdapterEngine
    tools: Tools
    registry: AdapterRegistry
    events: list[events.AdapterEvent]
    root: Path

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]

    async def quiet(self) -> None:
        """Until background work (drains, deletions) is done."""
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    async def serving(self, name: str) -> str:
        """Digest of the version that answers a request for `name` now."""
        async with await self.registry.acquire(name) as lease:
            self.engine.check_usable(lease.version)
            assert lease.version.name == self.registry.resolve(name)
            return lease.version.digest


SETTINGS = RegistrySettings(
    work_dir=Path("set in world()"),
    max_adapters=8,
    limits=EngineLimits(max_loras=4, max_cpu_loras=6, wait_s=0.2),
    acquire_wait_s=5.0,
    revoke_grace_s=0.2,
)
Test = Callable[..., Coroutine[Any, Any, None]]


def world_test(**changes: Any) -> Callable[[Test], Callable[[Path], None]]:
    """Runs an async test with a `World` whose settings and limits differ by `changes`."""

    def decorate(test: Test) -> Callable[[Path], None]:
        @wraps(test)
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                seen: list[events.AdapterEvent] = []
                engine, tools = FakeAdapterEngine(), Tools()
                limits = {k: v for k, v in changes.items() if hasattr(SETTINGS.limits, k)}
                others = {k: v for k, v in changes.items() if k not in limits}
                settings = replace(SETTINGS, work_dir=tmp_path, limits=replace(SETTINGS.limits, **limits), **others)
                registry = AdapterRegistry(engine, tools.bundle(), settings, on_event=seen.append)
                async with asyncio.timeout(20):
                    await test(World(engine, tools, registry, seen, tmp_path))

            asyncio.run(main())

        del run.__wrapped__  # pytest would look for its arguments as fixtures
        return run

    return decorate


async def fails(kind: type[HostError], awaitable: Awaitable[Any], text: str = ".") -> HostError:
    with pytest.raises(kind, match=text) as caught:
        await awaitable
    return caught.value
