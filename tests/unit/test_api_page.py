"""docs/api.md names every error code that a client can meet, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# before the port answers, or never seen by a client under this name
NOT_SEEN = {
    "bad_setting",
    "bedrock_off",
    "engine_arguments",
    "engine_mismatch",
    "invalid_base_config",
    "no_model",
    "not_loaded",
    "plugin_inactive",
    "server_flag",
    "target_exists",
    "unknown_setting",
    "unsupported_architecture",
}


def codes() -> set[str]:
    """Literal error codes of the package; Bedrock's routes have other names, the fake engine is for tests."""
    found: set[str] = set()
    for path in (ROOT / "src/lorahost").rglob("*.py"):
        if not {"bench", "bedrock", "fake.py"} & {*path.relative_to(ROOT).parts}:
            found |= set(re.findall(r'\bcode(?:: str)?\s*=\s*"([a-z_]+)"', path.read_text()))
    return found


def documented() -> set[str]:
    """Words in the second column of the page's table of errors."""
    page = (ROOT / "docs/api.md").read_text()
    rows = page[page.index("\n## Errors") :].splitlines()
    return {word for row in rows if row.startswith("| ") for word in re.findall(r"`([a-z_]+)`", row.split("|")[2])}


def test_every_code_is_in_the_table() -> None:
    assert codes() - NOT_SEEN - documented() == set()


def test_exceptions_exist() -> None:
    assert codes() >= NOT_SEEN
