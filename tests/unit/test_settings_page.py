"""docs/settings.md says what the settings are."""

import tempfile
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from lorahost import settings_page
from lorahost.errors import InvalidRequestError
from lorahost.settings import Settings, load_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == settings_page.page()


def row(variable: str) -> list[str]:
    """Variables, values, default and meaning."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{variable}`")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_names_that_a_setting_may_have_are_listed() -> None:
    named = {name: f for name, f in Settings.model_fields.items() if get_origin(f.annotation) is Literal}
    assert {"probe", "unknown_model", "bedrock", "log_level"} <= set(named)
    for name, field in named.items():
        assert row(f"LORAHOST_{name.upper()}")[1] == ", ".join(f"`{one}`" for one in get_args(field.annotation))


@pytest.mark.parametrize(
    ("variable", "bounds", "within", "beyond"),
    [
        ("LORAHOST_DRAIN_S", "at least 0, at most 25", ("0", "25"), ("-1", "25.1")),
        ("LORAHOST_PORT", "at least 1, at most 65535", ("1", "65535"), ("0", "65536")),
        ("LORAHOST_STALL_S", "above 0", ("0.1",), ("0",)),
        ("LORAHOST_SPARE_THREADS", "at least 8", ("8",), ("7",)),
    ],
)
def test_bounds_are_those_that_are_kept(
    variable: str, bounds: str, within: tuple[str, ...], beyond: tuple[str, ...]
) -> None:
    assert row(variable)[1] == bounds
    for value in within:
        load_settings({variable: value})
    for value in beyond:
        with pytest.raises(InvalidRequestError, match=variable):
            load_settings({variable: value})


def test_every_bound_is_on_the_page() -> None:
    bounded = [name for name, field in Settings.model_fields.items() if field.metadata]
    assert [name for name in bounded if not row(f"LORAHOST_{name.upper()}")[1]] == []


def test_defaults_are_the_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as the environment has them: each, given back, changes nothing."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    shown = {name: row(f"LORAHOST_{name.upper()}")[2].strip("`") for name in Settings.model_fields}
    # in the shell's words
    shown["work_dir"] = shown["work_dir"].replace("${TMPDIR:-/tmp}", tempfile.gettempdir())
    assert (shown["lora"], shown["drain_s"], shown["max_queued"]) == ("true", "20", "256")
    given = {f"LORAHOST_{name.upper()}": value for name, value in shown.items()}
    assert load_settings(given) == load_settings({})
    assert [name for name, value in shown.items() if not value] == [
        "base_name", "config_dir", "adapters_dir", "adapter_roots", "s3_endpoint_url"
    ]  # fmt: skip
