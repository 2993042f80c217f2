"""Where Bedrock's runtime API is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorahost import settings
from lorahost.errors import InvalidRequestError
from lorahost.settings import load_settings, under_sagemaker


@pytest.fixture(autouse=True)
def _no_model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "under_sagemaker", lambda environ: under_sagemaker(environ, tmp_path / "none"))


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, "on"),
        ({"LORAHOST_BEDROCK": "auto"}, "on"),
        ({"LORAHOST_BEDROCK": "off"}, "off"),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "1-2"}, "off"),
        ({"SAGEMAKER_SAFE_PORT_RANGE": ""}, "on"),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "1-2", "LORAHOST_BEDROCK": "auto"}, "off"),
        ({"SAGEMAKER_SAFE_PORT_RANGE": "1-2", "LORAHOST_BEDROCK": "on"}, "on"),
    ],
)
def test_it_is_on_but_under_sagemaker_only_if_asked_for(environ: dict[str, str], state: str) -> None:
    assert load_settings(environ).bedrock == state


def test_a_model_where_sagemaker_puts_it_counts_as_sagemaker(tmp_path: Path) -> None:
    assert not under_sagemaker({}, tmp_path / "none")
    assert not under_sagemaker({}, tmp_path), "an image may have the empty directory"
    (tmp_path / "config.json").write_text("{}")
    assert under_sagemaker({}, tmp_path)


def test_other_values_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="LORAHOST_BEDROCK='yes'"):
        load_settings({"LORAHOST_BEDROCK": "yes"})
