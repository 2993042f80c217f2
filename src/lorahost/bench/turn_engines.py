"""Engines as processes that take turns: started together, asked one at a time; standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lorahost.bench.files import write_whole
from lorahost.bench.turns import POLL_SECONDS, Ask, Json, words

TAIL = 15
STOP_SECONDS = 20.0
Clock = Callable[[], float]


class EngineDiedError(RuntimeError):
    """An engine's process ended or was not ready in time; the message has its name and its last log lines."""


class TimeUpError(RuntimeError):
    """The time limit came while an engine was measured; that repeat is lost."""


class TurnEngine:
    """One engine's process, a group of its own with the workers that it starts."""

    def __init__(
        self, name: str, line: Sequence[str], folder: Path, log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            name: Of the engine, for messages.
            line: Command line of a process that serves `folder`, see `turns`.
            folder: An empty one.
            log: File that gets its output.
            environ: Variables beside this process's.
        """
        self.name = name
        self.log = log
        self._folder = folder
        self._asked = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self._process = subprocess.Popen(
                line,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )

    @property
    def ready(self) -> bool:
        """Whether it is warm and waits.

        Raises:
            EngineDiedError: it ended before.
        """
        if (self._folder / "ready.json").exists():
            return True
        self._check("while it started")
        return False

    def ask(self, ask: Ask, limit: float, clock: Clock = time.monotonic) -> Json:
        """Asks and waits for the answer.

        Raises:
            EngineDiedError: it ended.
            TimeUpError: `clock` passed `limit`.
        """
        write_whole(self._folder / f"ask-{self._asked}.json", json.dumps(ask))
        answer = self._folder / f"answer-{self._asked}.json"
        self._asked += 1
        while not answer.exists():
            if clock() > limit:
                raise TimeUpError(f"time is up while {self.name} is asked {words(ask)}")
            self._check(f"while it was asked {words(ask)}", unless=answer)
            time.sleep(POLL_SECONDS)
        found: Json = json.loads(answer.read_text())
        return found

    def _check(self, when: str, unless: Path | None = None) -> None:
        code = self._process.poll()
        if code is not None and not (unless and unless.exists()):
            raise EngineDiedError(self.story(f"ended with {code} {when}"))

    def story(self, what: str) -> str:
        """What happened, with the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL:]
        return "\n".join([f"engine {self.name} {what}; the end of {self.log}:", *(f"  {line}" for line in lines)])

    def late(self, what: str) -> str:
        """The story of an engine that is not ready in time: its processes say in the log where they are."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGUSR1)
        time.sleep(1)
        return self.story(what)

    def tell_to_stop(self) -> None:
        """Asks it to end when its current answer is through."""
        write_whole(self._folder / "stop", "")

    def wait(self, deadline: float) -> None:
        """Waits until `deadline` of the monotonic clock, then kills it; its workers never outlive it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the whole group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
