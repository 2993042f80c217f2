"""docs/settings.md says what the settings are."""

from pathlib import Path

from lorahost import doctor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == doctor.settings_page()
