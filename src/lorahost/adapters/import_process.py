"""Runs the importer in a process of its own, so that it never holds the server's interpreter.

As a program (`python -m lorahost.adapters.import_process`) it reads one JSON job from stdin and writes one JSON
line to stdout: `{"report": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from lorahost.adapters.importer import ImportLimits, ImportReport, import_adapter, staging_path
from lorahost.adapters.layout import ModelLayout
from lorahost.errors import AdapterConflictError, AdapterRejectedError, CapacityError, HostError

_ERRORS: dict[str, type[HostError]] = {
    cls.__name__: cls for cls in (AdapterRejectedError, AdapterConflictError, CapacityError)
}
_NICE = 10


async def import_in_process(
    source: Path, target: Path, layout: ModelLayout, limits: ImportLimits, *, timeout_s: float = 600.0
) -> ImportReport:
    """`import_adapter` in a child of low priority; cancelling kills the child.

    Raises:
        AdapterRejectedError: as `import_adapter`, or with code `import_crashed` or `import_timeout`.
        AdapterConflictError: `target` exists.
        CapacityError: the disk is full.
    """
    job = {
        "source": str(source),
        "target": str(target),
        "layout": layout.to_json(),
        "limits": limits.model_dump(),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await child.communicate(json.dumps(job).encode())
    except TimeoutError as e:
        raise AdapterRejectedError(
            f"checking the adapter took more than the allowed {timeout_s:g} s", code="import_timeout"
        ) from e
    finally:
        await _reap(child, target)
    return _read_answer(stdout, stderr, child.returncode)


async def _reap(child: asyncio.subprocess.Process, target: Path) -> None:
    """Kills the child if it still runs, and removes what it left."""
    if child.returncode is None:
        child.kill()
        await asyncio.shield(child.wait())
    shutil.rmtree(staging_path(target, child.pid), ignore_errors=True)


def _read_answer(stdout: bytes, stderr: bytes, returncode: int | None) -> ImportReport:
    try:
        answer = json.loads(stdout)
    except ValueError:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        killed = returncode is not None and returncode < 0
        how = signal.Signals(-returncode).name if killed and returncode else f"exit status {returncode}"
        raise AdapterRejectedError(
            f"the import process ended without an answer ({how}): {lines[-1]:.500}", code="import_crashed"
        ) from None
    if error := answer.get("error"):
        raise _ERRORS[error.pop("kind")](error.pop("message"), **error)
    return ImportReport.model_validate(answer["report"])


def _run(job: dict[str, Any]) -> dict[str, Any]:
    try:
        layout = ModelLayout.from_json(job["layout"])
        limits = ImportLimits.model_validate(job["limits"])
        report = import_adapter(Path(job["source"]), Path(job["target"]), layout, limits)
    except HostError as e:
        return {"error": _error(e)}
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return {"error": _error(CapacityError(f"no space left for {job['target']}: {e}", code="disk_full"))}
    return {"report": report.model_dump()}


def _error(e: HostError) -> dict[str, Any]:
    return {
        "kind": type(e).__name__,
        "message": e.message,
        "code": e.code,
        "param": e.param,
        "status": e.status,
        "retry_after_s": e.retry_after_s,
        "details": e.details,
    }


def main() -> None:
    """Entry point of the child."""
    os.nice(_NICE)
    answer = _run(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
