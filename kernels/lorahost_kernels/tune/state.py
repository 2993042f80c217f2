"""What a stopped run had done, so that the same command goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lorahost_kernels.configs import Config, ExpandConfig, ShrinkConfig
from lorahost_kernels.tune.writer import Result, Row, replace_text


class StateError(ValueError):
    """A state file that can't be used; the message says what to do."""


class State:
    """The results of one run, kept in a file that is rewritten after each point.

    `starts` are the points that were in use when the run began; None in a new run, until whoever runs it sets them.

    Args:
        path: The file.
        key: What makes two runs the same run.

    Raises:
        StateError: the file is of another run, or no state file.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.key = path, key
        self.results: list[Result] = []
        self.banned: list[str] = []
        self.starts: list[Result] | None = None
        if path.exists():
            self._load()

    def add(self, result: Result) -> None:
        """Keeps a result, in the file too; in place of an earlier one of its point."""
        self.results = [*{r.place: r for r in (*self.results, result)}.values()]
        self._save()

    def ban(self, candidate: str) -> None:
        """Keeps a candidate that must not run again."""
        self.banned.append(candidate)
        self._save()

    def finish(self) -> None:
        """Everything is done: the next run begins anew."""
        self.path.unlink(missing_ok=True)

    def _save(self) -> None:
        rows, starts = ([result_json(r) for r in results] for results in (self.results, self.starts or []))
        content = {"key": self.key, "results": rows, "banned": self.banned, "starts": starts}
        replace_text(self.path, json.dumps(content))

    def _load(self) -> None:
        remedy = f"remove {self.path} to begin anew"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.results = [result_of(r) for r in found["results"]]
            self.banned = [str(b) for b in found["banned"]]
            self.starts = [result_of(r) for r in found["starts"]]
            key = found["key"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{self.path} is no state of the tuner ({type(error).__name__}: {error}); {remedy}"
            ) from None
        other = [k for k in {**key, **self.key} if key.get(k) != self.key.get(k)]
        if other:
            k = other[0]
            raise StateError(f"{self.path} is of a run with {k}={key.get(k)!r}, not {self.key.get(k)!r}; {remedy}")


def result_json(result: Result) -> dict[str, Any]:
    """A result as JSON types."""
    rows = [
        {
            "module": module,
            "operation": op,
            "half": "shrink" if isinstance(row.config, ShrinkConfig) else "expand",
            "config": vars(row.config),
            "before_us": row.before_us,
            "after_us": row.after_us,
        }
        for (module, op), row in result.rows.items()
    ]
    return {**{k: v for k, v in vars(result).items() if k != "rows"}, "rows": rows}


def result_of(data: dict[str, Any]) -> Result:
    """The result of `result_json`. Raises KeyError or TypeError where it isn't one."""
    rows: dict[tuple[str, str], Row] = {}
    for r in data["rows"]:
        config: Config = ShrinkConfig(**r["config"]) if r["half"] == "shrink" else ExpandConfig(**r["config"])
        rows[r["module"], r["operation"]] = Row(config, r["before_us"], r["after_us"])
    return Result(**{**data, "rows": rows})
