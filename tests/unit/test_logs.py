from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from lorahost import logs

KEPT = ("level", "handlers", "propagate")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Configures logging as the server does, and gives back what it wrote as objects."""
    names = ("", "lorahost", "lorahost_kernels", logs.REQUEST_LOGGER)
    before = {name: {k: getattr(logging.getLogger(name), k) for k in KEPT} for name in names}
    yield lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for name, state in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(state["level"])
        logger.handlers, logger.propagate = state["handlers"], state["propagate"]


def test_one_object_a_record_with_extras_as_keys(lines: Any) -> None:
    logs.configure("info")
    logging.getLogger("lorahost.host").info("ready in %d s", 3, extra={"seconds": 3.5, "path": object})
    [line] = lines()
    assert line["message"] == "ready in 3 s"
    assert (line["level"], line["logger"], line["seconds"]) == ("info", "lorahost.host", 3.5)
    assert line["path"] == str(object)
    assert line["time"].endswith("Z")
    assert set(line) == {"time", "level", "logger", "message", "seconds", "path"}


def test_several_lines_stay_one_record(lines: Any) -> None:
    logs.configure("info")
    try:
        raise ValueError("two\nlines é")
    except ValueError:
        logging.getLogger("lorahost").exception("it\nbroke")
    [line] = lines()
    assert line["message"] == "it\nbroke"
    assert "ValueError: two\nlines é" in line["error"]


@pytest.mark.parametrize(("level", "expected"), [("debug", ["d", "i", "e"]), ("info", ["i", "e"]), ("error", ["e"])])
def test_the_level_is_the_hosts(lines: Any, level: str, expected: list[str]) -> None:
    logs.configure(level)
    for name in ("lorahost.x", "lorahost_kernels.x", "somebody.else"):
        logging.getLogger(name).debug("d")
        logging.getLogger(name).info("i")
        logging.getLogger(name).error("e")
    found = lines()
    assert [line["message"] for line in found if line["logger"] == "lorahost.x"] == expected
    assert [line["message"] for line in found if line["logger"] == "lorahost_kernels.x"] == expected
    assert [line["message"] for line in found if line["logger"] == "somebody.else"] == ["e"]


def test_request_lines_are_written_at_any_level_without_what_is_unknown(lines: Any) -> None:
    logs.configure("error")
    logs.request_line({"request_id": "r1", "code": 200, "ttft_ms": None})
    [line] = lines()
    assert (line["request_id"], line["code"], line["logger"]) == ("r1", 200, "lorahost.request")
    assert "ttft_ms" not in line


def test_a_library_that_silences_the_root_does_not_silence_the_host(lines: Any) -> None:
    logs.configure("info")
    root = logging.getLogger()
    root.setLevel(logging.ERROR)
    for handler in root.handlers:
        handler.setLevel(logging.ERROR)
    logging.getLogger("lorahost.host").info("ready")
    logs.request_line({"request_id": "r1"})
    assert [line["message"] for line in lines()] == ["ready", "request"]
