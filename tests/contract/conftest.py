"""Servers for the contract tests: one that all share, one with a controllable engine, and ones for a single test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.running import Server, make_adapter, running, start

Starter = Callable[..., Server]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`lorahost serve` with the fake engine and the adapters a1 and a2; tests leave it as they found it."""
    directory = tmp_path_factory.mktemp("server")
    for name in ("a1", "a2"):
        make_adapter(directory / "adapters" / name, name)
    env = {"LORAHOST_ADAPTERS_DIR": str(directory / "adapters"), "LORAHOST_SESSIONS": "true"}
    with running(directory, env) as one:
        yield one


@pytest.fixture(scope="session")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same around an engine that shows what runs in it; tests set `step_s` back to 0.002."""
    directory = tmp_path_factory.mktemp("controlled")
    for name in ("a1", "a2"):
        make_adapter(directory / "adapters" / name, name)
    with running(directory, {"LORAHOST_ADAPTERS_DIR": str(directory / "adapters")}, {}) as one:
        yield one


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Starter]:
    """Starts servers of a test's own: `started(env, engine, ready=True, files=None)`."""
    with contextlib.ExitStack() as stack:

        def begin(
            env: dict[str, str] | None = None,
            engine: dict[str, object] | None = None,
            *,
            ready: bool = True,
            files: int | None = None,
        ) -> Server:
            one = start(tmp_path / "servers", env, engine, files)
            stack.callback(one.stop)
            if ready:
                one.wait_ready()
            return one

        yield begin


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Makes adapter directories: `adapter("name")`."""
    return lambda name, tag=None, rank=8: make_adapter(tmp_path / "sources" / name, tag or name, rank)
