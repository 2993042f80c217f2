"""What tests of every folder share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def plugin_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs, from INFO, whatever other tests of this process have imported.

    Its logger is below vLLM's, which once set up hands nothing on to the root's handlers, pytest's among them. A
    package that vLLM imports sets these to errors only, and pytest has one handler for all tests.
    """
    logger = logging.getLogger("vllm.lorahost")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
