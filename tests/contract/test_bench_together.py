"""Servers with the fake engine that are started together and measured in turn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from lorahost.bench import http_turns, rows, turns
from lorahost.bench.http_server import ServerEndedError, held_port
from lorahost.bench.loads import Load
from lorahost.bench.point import Point, to_arguments
from lorahost.cli import main

POINT = Point(
    "ours", model="tiny-gpt-oss", input=16, output=8, loads=(Load(concurrency=2),), requests=4, warmup=1, adapters=2,
    rank=8, via="http",
)  # fmt: skip
SMALL = ("--model", "tiny-gpt-oss", "--input", "16", "--output", "8", "--rank", "8", "--requests", "4")


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAHOST_ENGINE", "fake")


def processes(mark: str) -> list[str]:
    """Command lines of processes that have `mark` in their environment or their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in line + environ and int(path.name) != os.getpid():
            found.append(line.replace(b"\0", b" ").decode())
    return found


def wait(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def asks(folder: Path, *wanted: turns.Ask) -> None:
    folder.mkdir()
    for n, ask in enumerate(wanted):
        (folder / f"ask-{n}.json").write_text(json.dumps(ask))
    (folder / "stop").touch()


def ask_of(base: bool, number: int) -> turns.Ask:
    return {"what": "load", "load": "closed:2", "base": base, "alternation": number, "repeat": 1}


def test_a_server_answers_asks_with_rows_and_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    asks(folder, ask_of(False, 1), ask_of(True, 2))
    asyncio.run(http_turns.take_turns(POINT, tmp_path / "work", folder, tmp_path / "server.log", {"commit": "c"}))
    found = [json.loads((folder / f"answer-{n}.json").read_text())["row"] for n in range(2)]
    rows.append(tmp_path / "rows.csv", found)
    read = rows.read(tmp_path / "rows.csv")
    assert [(r["path"], r["via"], r["alternation"], r["requests"], r["errors"], r["tokens"]) for r in read] == [
        ("ours", "http", "1", "4", "0", "32"), ("lora-base", "http", "2", "4", "0", "32"),
    ]  # fmt: skip
    assert len({r["run"] for r in read}) == 1
    assert json.loads((folder / "ready.json").read_text())["gpu"] == read[0]["gpu"]
    assert processes(str(folder)) == []


def test_a_server_that_ends_is_said_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAHOST_ENGINE", "steam")
    folder = tmp_path / "turns"
    asks(folder)
    with pytest.raises(ServerEndedError, match=r"ended with 30(.|\n)*LORAHOST_ENGINE='steam'"):
        asyncio.run(http_turns.take_turns(POINT, tmp_path / "work", folder, tmp_path / "server.log", {}))


def test_a_held_port_is_not_given_to_others_but_can_be_listened_on() -> None:
    hold, port = held_port()
    other, second = held_port()
    with hold, other:
        assert port != second
        code = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))).close()"
        subprocess.run([sys.executable, "-c", code, str(port)], check=True, timeout=60)


def test_a_server_ends_when_the_run_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    folder.mkdir()
    line = [sys.executable, "-m", "lorahost.bench.engine_point", *to_arguments(POINT), "--turns", str(folder)]
    line += ["--work", str(tmp_path / "work"), "--server-log", str(tmp_path / "server.log")]
    # the process between starts it, as a run does, and ends without a word as soon as it is ready
    parent = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "subprocess.Popen(sys.argv[2:], start_new_session=True)\n"
        "while not (Path(sys.argv[1]) / 'ready.json').exists(): time.sleep(0.02)"
    )
    subprocess.run([sys.executable, "-c", parent, str(folder), *line], check=True, timeout=120)
    wait(lambda: processes(str(folder)) == [])


def test_engines_behind_the_server_are_measured_together(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    line = [sys.executable, "-m", "lorahost.bench.together", *SMALL, "--adapters", "2", "--loads", "closed:2"]
    line += ["--paths", "ours@http,few=ours@http", "--slots-of", "few=1", "--alternations", "2", "--base-loads", ""]
    line += ["--out", str(out), "--work", str(tmp_path / "work"), "--logs", str(tmp_path / "logs")]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = rows.read(out)
    assert [(r["alternation"], r["slots"], r["via"], r["errors"]) for r in found] == [
        ("1", "2", "http", "0"), ("1", "1", "http", "0"), ("2", "1", "http", "0"), ("2", "2", "http", "0"),
    ]  # fmt: skip
    assert len({r["run"] for r in found}) == 2
    logs = sorted(path.name for path in (tmp_path / "logs").glob("*.log"))
    assert logs == ["few-server.log", "few.log", "ours-http-server.log", "ours-http.log"]
    homes = {re.findall(r'"work_dir": "([^"]+)"', (tmp_path / "logs" / name).read_text())[0] for name in logs[::2]}
    assert len(homes) == 2
    assert not any(Path(home).exists() for home in homes)
    assert processes(str(tmp_path / "work")) == []


def test_more_adapters_than_slots_are_measured_together(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    line = ["bench", "slots", "--together", *SMALL, "--adapters", "2", "--slots", "1", "--alternations", "1"]
    line += ["--out", str(out), "--work", str(tmp_path / "work"), "--limit", "280"]
    ran = CliRunner().invoke(main, line)
    # whether the claims hold says nothing here: the fake engine has no slots
    assert "| claim | measured | limit | holds |" in ran.output, ran.output
    found = rows.read(out)
    assert [(r["benchmark"], r["slots"], r["load"].split(":")[0], r["errors"]) for r in found] == [
        ("slots-rate", "2", "closed", "0"), ("slots-rate", "2", "poisson", "0"),
        ("slots", "2", "poisson", "0"), ("slots", "1", "poisson", "0"),
        ("slots", "2", "closed", "0"), ("slots", "1", "closed", "0"),
    ]  # fmt: skip
