"""gunicorn's words about processes that aren't its workers, and about exit codes that are ours."""

from __future__ import annotations

import logging

import pytest
from gunicorn.config import Config

from lorahost.http.worker import HostLogger


@pytest.fixture
def logger() -> HostLogger:
    made = HostLogger(Config())
    made.workers = {41: object()}
    return made


@pytest.mark.parametrize(
    ("level", "message", "args"),
    [
        ("error", "Worker (pid:42) was sent SIGKILL! Perhaps out of memory?", ()),
        ("error", "Worker (pid:%s) exited with code %s.", (42, 1)),
        ("warning", "Worker (pid:42) was sent SIGABRT!", ()),
    ],
)
def test_only_a_worker_s_end_is_worth_an_error(
    logger: HostLogger, caplog: pytest.LogCaptureFixture, level: str, message: str, args: tuple[int, ...]
) -> None:
    with caplog.at_level(logging.INFO):
        getattr(logger, level)(message, *args)
        assert [(r.levelname, r.name) for r in caplog.records] == [("INFO", "lorahost.http.worker")]
        caplog.clear()
        getattr(logger, level)(message.replace("42", "41"), *(41 if a == 42 else a for a in args))
    assert [r.levelname for r in caplog.records] == [level.upper()]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Worker failed to boot.", "Reason: the engine has failed (exit code 3)"),
        ("App failed to load.", "Reason: the server could not start (exit code 4)"),
        ("the worker ended", "Reason: the worker ended"),
    ],
)
def test_our_exit_codes_have_our_meaning(
    logger: HostLogger, caplog: pytest.LogCaptureFixture, reason: str, said: str
) -> None:
    logger.error("Reason: %s", reason)
    assert [r.getMessage() for r in caplog.records] == [said]
