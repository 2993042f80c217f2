"""JSON whose every value knows its line, and whose objects hold each key once."""

from __future__ import annotations

import json
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

Path = tuple[str | int, ...]


class ConfigError(ValueError):
    """A file that is refused as a whole; the message names file, line and field."""


def parse(text: str, where: str) -> tuple[Any, dict[Path, int]]:
    """(the value, the line of each value in it by its path).

    Raises:
        ConfigError: no JSON, a key twice in one object, or nesting too deep to read.
    """
    try:
        value = json.loads(text)
        lines: dict[Path, int] = {}
        _Walk(text, where, lines).value(_space(text, 0), ())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{where}: {error}") from None
    return value, lines


def line_of(lines: dict[Path, int], path: Path) -> int:
    """The line of the longest known part of a path; steps that the text doesn't have are passed over."""
    known: Path = ()
    for step in path:
        if (*known, step) in lines:
            known = (*known, step)
    return lines[known]


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


class _Walk:
    """Goes over a text that is known to be JSON."""

    def __init__(self, text: str, where: str, lines: dict[Path, int]) -> None:
        self.text, self.where, self.lines = text, where, lines
        self._decoder = json.JSONDecoder()
        self._seen, self._line = 0, 1

    def value(self, at: int, path: Path) -> int:
        """Notes the lines of the value at `at`; returns where it ends."""
        self._line += self.text.count("\n", self._seen, at)
        self._seen = at
        self.lines.setdefault(path, self._line)
        if self.text[at] not in "{[":
            return self._decoder.raw_decode(self.text, at)[1]
        closing = "}" if self.text[at] == "{" else "]"
        at, count, keys = _space(self.text, at + 1), 0, set[str]()
        while self.text[at] != closing:
            step: str | int = count
            if closing == "}":
                key, at = scanstring(self.text, at + 1, True)
                if key in keys:
                    line = self._line + self.text.count("\n", self._seen, at)
                    raise ConfigError(f"{self.where}:{line}: {key!r} is there twice")
                keys.add(key)
                step, at = key, _space(self.text, _space(self.text, at) + 1)
            at = _space(self.text, self.value(at, (*path, step)))
            count += 1
            if self.text[at] == ",":
                at = _space(self.text, at + 1)
        return at + 1
