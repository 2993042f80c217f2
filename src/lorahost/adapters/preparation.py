"""From a source to normalised files: fetch, check, import, each off the loop, in a workspace of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lorahost.adapters import events
from lorahost.adapters.versions import ImportReport, Stage, Version
from lorahost.adapters.workers import Runner
from lorahost.errors import AdapterConflictError, AdapterRejectedError

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterTools:
    """The blocking work on adapter files; each callable may run in any thread.

    Attributes:
        fetch: `fetch(src, into)` returns the directory with `adapter_config.json`; it writes only below
            `into`, but may return a local source as it is.
        digest_of: Hex sha256 over the adapter's files in a directory.
        import_: `import_(source, target)` writes the normalised adapter into the new directory `target`;
            nothing reads the source afterwards.
    """

    fetch: Callable[[str, Path], Path]
    digest_of: Callable[[Path], str]
    import_: Callable[[Path, Path], ImportReport]


@dataclass(eq=False)
class Workspace:
    """A directory for one change of one adapter; its number is never used again.

    Attributes:
        abandoned: A job that still runs in here although nobody waits for it.
    """

    name: str
    path: Path
    cancelled: asyncio.Event
    seconds: dict[str, float] = field(default_factory=dict)
    abandoned: asyncio.Task[object] | None = None

    @property
    def download(self) -> Path:
        return self.path / "source"

    @property
    def target(self) -> Path:
        return self.path / "adapter"


class Preparation:
    """Runs the stages before the engine; a removal of the adapter ends the wait for any of them at once."""

    def __init__(self, tools: AdapterTools, work_dir: Path, run: Runner, delete: Runner, emit: events.Emit) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        _remove_orphans(work_dir)
        self.root = Path(tempfile.mkdtemp(prefix=f"adapters-{os.getpid()}-", dir=work_dir))
        self._tools = tools
        self._run = run
        self._delete = delete
        self._emit = emit
        self._numbers = itertools.count(1)
        self._jobs: set[asyncio.Task[None]] = set()

    def open(self, name: str, cancelled: asyncio.Event) -> Workspace:
        """A new workspace for adapter `name`, given up when `cancelled` is set."""
        # The adapter's name stays out of the path: it is the client's input.
        return Workspace(name, self.root / f"{next(self._numbers):06d}", cancelled)

    async def fetch(self, workspace: Workspace, src: str) -> tuple[Path, str]:
        """Returns the directory of the source and its digest."""

        def fetch() -> Path:
            workspace.download.mkdir(parents=True)
            return self._tools.fetch(src, workspace.download)

        source = await self._stage(workspace, "fetch", fetch)
        return source, await self._digest(workspace, source)

    async def import_(self, workspace: Workspace, source: Path, digest: str) -> Version:
        """Writes the normalised adapter.

        Raises:
            AdapterRejectedError: it can't be served, or the source changed while it was read.
        """
        report = await self._stage(workspace, "import", lambda: self._tools.import_(source, workspace.target))
        if not source.is_relative_to(workspace.path) and await self._digest(workspace, source) != digest:
            raise AdapterRejectedError(
                f"src {str(source)!r} of adapter {workspace.name!r} changed while being read; register again",
                code="source_changed",
                param="src",
            )
        return Version(
            name=workspace.name,
            digest=digest,
            workspace=workspace.path,
            path=workspace.target,
            rank=report.rank,
            modules=frozenset(report.modules),
            bytes=report.bytes,
            warnings=list(report.warnings),
            seconds=workspace.seconds,
        )

    def keep_target(self, workspace: Workspace) -> None:
        """Deletes the download; the version owns the rest from now on."""
        self._later(workspace.download, None)

    def close(self, workspace: Workspace) -> None:
        """Deletes all of a workspace that no version owns, once no job runs in it."""
        self._later(workspace.path, workspace.abandoned)

    async def delete(self, path: Path) -> None:
        """Deletes a directory; what can't be deleted is logged and stays."""
        await self._delete(lambda: shutil.rmtree(path, onerror=_log_failure))

    async def _digest(self, workspace: Workspace, source: Path) -> str:
        return await self._stage(workspace, "check", lambda: self._tools.digest_of(source))

    async def _stage(self, workspace: Workspace, stage: Stage, work: Callable[[], T]) -> T:
        cancelled = workspace.cancelled

        def unless_cancelled() -> T:
            if cancelled.is_set():
                raise removed_meanwhile(workspace.name)
            return work()

        started = time.monotonic()
        job: asyncio.Task[T] = asyncio.ensure_future(self._run(unless_cancelled))
        stop = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait({job, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not job.done():
                workspace.abandoned = job
        if not job.done():
            raise removed_meanwhile(workspace.name)
        result = job.result()
        seconds = time.monotonic() - started
        workspace.seconds[stage] = workspace.seconds.get(stage, 0.0) + seconds
        self._emit(events.StageFinished(workspace.name, stage, seconds))
        return result

    def _later(self, path: Path, after: asyncio.Task[object] | None) -> None:
        async def run() -> None:
            if after is not None:
                await asyncio.wait({after})
                # Nobody waits for its result any more; a failure of it is no news.
                if not after.cancelled():
                    after.exception()
            await self.delete(path)

        job = asyncio.create_task(run())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


def _remove_orphans(work_dir: Path) -> None:
    """Deletes what killed processes left; several servers may share a work directory."""
    for path in work_dir.glob("adapters-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and owner != str(os.getpid()) and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, onerror=_log_failure)


def _log_failure(call: object, path: str, info: tuple[object, BaseException, object]) -> None:
    # Two deletions may overlap: a download's and, a little later, its whole workspace's.
    if not isinstance(info[1], FileNotFoundError):
        log.warning("can't delete %s: %s", path, info[1])


def removed_meanwhile(name: str) -> AdapterConflictError:
    """The answer to a change whose adapter was removed before it was done."""
    return AdapterConflictError(
        f"adapter {name!r} was removed before this change was done",
        code="removed_while_loading",
        param="name",
    )
