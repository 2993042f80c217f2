"""What a server leaves behind, and what it makes of signals that are not meant for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.fakes.running import Server, make_adapter, start, wait_for

Starter = Callable[..., Server]


def test_sigterm_leaves_no_files_and_a_start_clears_those_of_the_dead(started: Starter, tmp_path: Path) -> None:
    work = tmp_path / "work"
    orphan = work / "adapters-999999999-x"
    orphan.mkdir(parents=True)
    alien = work / "other"
    alien.mkdir()
    root = tmp_path / "adapters"
    make_adapter(root / "one", "one")
    server = started({"LORAHOST_WORK_DIR": str(work), "LORAHOST_ADAPTERS_DIR": str(root)})
    assert not orphan.exists()
    assert len(list(work.glob("adapters-*"))) == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert [p.name for p in work.iterdir()] == ["other"]


def test_signals_that_would_replace_or_double_the_worker_are_ignored(started: Starter) -> None:
    server = started()
    for sig in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        server.process.send_signal(sig)
    wait_for(lambda: sum("is ignored" in line["message"] for line in server.log_lines()) == 3, 5)
    assert server.ping() == 200
    assert server.process.poll() is None


def test_adapters_at_start_may_be_archives_and_hidden_folders_are_none(started: Starter, tmp_path: Path) -> None:
    import tarfile

    root = tmp_path / "adapters"
    make_adapter(root / "plain", "plain")
    (root / ".cache").mkdir()
    source = make_adapter(tmp_path / "src", "packed")
    with tarfile.open(root / "packed.tar.gz", "w:gz") as tar:
        tar.add(source, ".")
    server = started({"LORAHOST_ADAPTERS_DIR": str(root)})
    names = {one["name"]: one["state"] for one in server.get("/adapters").json()["adapters"]}
    assert names == {"plain": "ready", "packed": "ready"}


def test_an_adapters_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    server = start(tmp_path, {"LORAHOST_ADAPTERS_DIR": "/no/such/folder"})
    assert server.process.wait(20) == 39
    assert "/no/such/folder" in server.log.read_text()
