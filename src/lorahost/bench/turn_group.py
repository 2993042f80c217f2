"""The engines of one run: started at the same time, asked one after the other; standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorahost.bench.turn_engines import STOP_SECONDS, Clock, EngineDiedError, TimeUpError, TurnEngine
from lorahost.bench.turns import POLL_SECONDS, Ask, Json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """How one engine is started; see `TurnEngine`."""

    line: Sequence[str]
    folder: Path
    log: Path
    environ: Mapping[str, str]


class Group:
    """Engines by name; those that die are named and left out.

    Args:
        say: Gets progress.
        trouble: Gets what goes wrong.
        start_limit: Seconds until all must be ready.
        limit: Seconds after which nothing is waited for.
        clock: Of these seconds.
    """

    def __init__(self, say: Say, trouble: Say, start_limit: float, limit: float, clock: Clock) -> None:
        self._say = say
        self._trouble = trouble
        self._start_limit = min(start_limit, limit)
        self._limit = limit
        self._clock = clock
        self._began = clock()
        self._engines: dict[str, TurnEngine] = {}

    @property
    def seconds(self) -> float:
        """Since this was made."""
        return self._clock() - self._began

    def start(self, starts: Mapping[str, Start]) -> None:
        """Starts all and waits until each is ready or given up."""
        for name, s in starts.items():
            s.folder.mkdir()
            self._engines[name] = TurnEngine(name, s.line, s.folder, s.log, s.environ)
        waiting = set(self._engines)
        while waiting:
            for name in sorted(waiting):
                try:
                    if self._engines[name].ready:
                        waiting.discard(name)
                        self._say(f"{name} is ready after {self.seconds:.0f} s")
                    elif self.seconds > self._start_limit:
                        raise EngineDiedError(self._engines[name].late(f"is not ready after {self.seconds:.0f} s"))
                except EngineDiedError as error:
                    waiting.discard(name)
                    self._lose(name, error)
            time.sleep(POLL_SECONDS)

    def ask(self, name: str, ask: Ask) -> Json | None:
        """The answer, or None of an engine that is gone.

        Raises:
            TimeUpError: the limit came first.
        """
        if name not in self._engines:
            return None
        try:
            return self._engines[name].ask(ask, self._began + self._limit, self._clock)
        except EngineDiedError as error:
            self._lose(name, error)
            return None
        except TimeUpError:
            # it is in the middle of something whose answer is lost
            self._engines.pop(name).kill()
            raise

    def _lose(self, name: str, error: EngineDiedError) -> None:
        self._trouble(str(error))
        self._engines.pop(name).kill()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all of them; those that don't within `seconds` are killed."""
        for engine in self._engines.values():
            engine.tell_to_stop()
        deadline = time.monotonic() + seconds
        for engine in self._engines.values():
            engine.wait(deadline)
