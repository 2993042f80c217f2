"""No mix of loads, swaps, removals, invocations and lost clients is answered by the wrong adapter.

Every answer of the fake engine repeats the adapter version that wrote it. A few callers at once draw what they do from
a seed; each knows which weights its own adapter may have, so every answer can be checked.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.running import ADAPTER_HEADER, ATTRIBUTES_HEADER, Answer, Server, make_adapter, running, wait_for
from tests.fakes.wire import Wire

SECONDS = 6.0
CALLERS = 6
VERSIONS = 3
ADAPTERS = tuple(f"ad{i}" for i in range(8))
# What a refusal may be: the adapter is not there, is failed or going, there is no room.
REFUSALS = {404, 409, 424, 429, 503, 507}


class Caller(threading.Thread):
    """Draws actions on all adapters until the time is up, and keeps every answer that must not be.

    Args:
        server: Where to send them.
        sources: Directory by adapter and version.
        digests: First 12 characters of the digest by adapter and version.
        seed: Of its draws.
    """

    def __init__(
        self,
        server: Server,
        sources: dict[tuple[str, int], Path],
        digests: dict[tuple[str, int], str],
        seed: int,
        until: float,
    ) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.sources = sources
        self.digests = digests
        self.random = random.Random(seed)
        self.until = until
        self.wrong: list[str] = []
        self.done: dict[str, int] = {}
        self.served: set[str] = set()
        self.answers = 0

    def run(self) -> None:
        weights = {self.whole: 6, self.streamed: 6, self.lost: 3, self.load: 3, self.remove: 2, self.update: 1}
        actions, odds = list(weights), list(weights.values())
        while time.monotonic() < self.until:
            [action] = self.random.choices(actions, odds)
            name = self.random.choice(ADAPTERS)
            try:
                action(name)
            except Exception as error:
                self.wrong.append(f"{action.__name__} {name}: {error!r}")
            self.done[action.__name__] = self.done.get(action.__name__, 0) + 1

    def check(self, name: str, words: list[str], attributes: str | None) -> None:
        """All words come from one version of `name`, the one that the header names."""
        versions = {f"{name}@{self.digests[name, v]}" for v in range(VERSIONS)}
        self.served.add(words[0])
        self.answers += 1
        if len(set(words)) != 1 or words[0] not in versions:
            self.wrong.append(f"{name} was answered by {sorted(set(words))}")
        elif attributes != f"adapter={name};version={words[0].partition('@')[2]}":
            self.wrong.append(f"{words[0]} answered, the header says {attributes}")

    def refused(self, name: str, answer: Answer) -> None:
        """A refusal must be one of those that callers are told of, and say why."""
        if answer.status not in REFUSALS or not answer.error["message"]:
            self.wrong.append(f"{name}: {answer.status} {answer.body[:300]!r}")

    def whole(self, name: str) -> None:
        """A whole answer, the adapter named in one of the ways there are."""
        body: dict[str, object] = {"prompt": "hi", "max_tokens": self.random.randint(1, 12)}
        headers: dict[str, str] = {}
        way = self.random.randrange(4)
        if way == 0:
            headers[ADAPTER_HEADER] = name
        elif way == 1:
            headers[ATTRIBUTES_HEADER] = f"adapter={name}"
        else:
            body["model" if way == 2 else "adapter_id"] = name
        answer = self.server.request("POST", "/invocations", body, headers)
        if answer.status == 200:
            self.check(name, answer.text.split(), answer.headers[ATTRIBUTES_HEADER])
        else:
            self.refused(name, answer)

    def streamed(self, name: str) -> None:
        """A stream read to its end; an error inside it is a refusal."""
        with Wire(self.server.port) as wire:
            wire.post("/invocations", {"prompt": "hi", "max_tokens": 20, "stream": True}, {ADAPTER_HEADER: name})
            status, headers, _ = wire.head()
            if status != 200:
                assert status in REFUSALS, (status, wire.exactly(int(headers["content-length"])))
                return
            events = [data.decode() for _, data in wire.chunks()]
        assert events[-1] == "data: [DONE]\n\n", events[-1]
        parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        words = [word for one in parsed if "choices" in one for word in one["choices"][0]["text"].split()]
        errors = [one["error"]["code"] for one in parsed if "error" in one]
        assert errors in ([], ["adapter_removed"]), errors
        assert errors or len(words) == 20
        if words:
            self.check(name, words, headers[ATTRIBUTES_HEADER.lower()])

    def lost(self, name: str) -> None:
        """A client that leaves at any moment."""
        wire = Wire(self.server.port)
        body = {"prompt": "hi", "max_tokens": 3000, "stream": self.random.random() < 0.5}
        wire.post("/invocations", body, {ADAPTER_HEADER: name})
        time.sleep(self.random.random() * 0.02)
        if self.random.random() < 0.5:
            wire.reset()
        else:
            wire.close()

    def load(self, name: str) -> None:
        """Registers any version: new, the same again, or a swap."""
        src = self.sources[name, self.random.randrange(VERSIONS)]
        answer = self.server.add(name, src, preload=self.random.random() < 0.7)
        if answer.status != 200:
            self.refused(name, answer)

    def remove(self, name: str) -> None:
        answer = self.server.remove(name)
        if answer.status != 200:
            self.refused(name, answer)

    def update(self, name: str) -> None:
        body = {"src": str(self.sources[name, self.random.randrange(VERSIONS)])}
        answer = self.server.request("POST", f"/adapters/{name}/update", body)
        if answer.status != 200:
            self.refused(name, answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three slots and room for six versions: slots change hands and versions are evicted all the time."""
    env = {"LORAHOST_MAX_RUNNING": "12", "LORAHOST_MAX_QUEUED": "12"}
    engine = {"max_loras": 3, "max_cpu_loras": 6, "load_s": 0.003, "step_s": 0.001}
    with running(tmp_path_factory.mktemp("isolation"), env, engine) as one:
        yield one


@pytest.mark.parametrize("seed", [11, 22, 33])
def test_nobody_is_answered_by_the_wrong_adapter(server: Server, tmp_path: Path, seed: int) -> None:
    keys = [(name, version) for name in ADAPTERS for version in range(VERSIONS)]
    sources = {(n, v): make_adapter(tmp_path / f"{n}-{v}", f"{n} version {v}") for n, v in keys}
    digests: dict[tuple[str, int], str] = {}
    for (name, version), src in sources.items():
        digests[name, version] = server.add("measure", src, preload=False).json()["adapter"]["digest"][:12]
        assert server.remove("measure").status == 200
    assert len(set(digests.values())) == len(keys)
    until = time.monotonic() + SECONDS
    callers = [Caller(server, sources, digests, seed * 100 + i, until) for i in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(SECONDS + 60)
        assert not caller.is_alive()
    assert [wrong for caller in callers for wrong in caller.wrong] == []
    for action in ("whole", "streamed", "lost", "load", "remove", "update"):
        assert sum(caller.done.get(action, 0) for caller in callers) > 3
    assert sum(caller.answers for caller in callers) > 50
    assert len(set().union(*(caller.served for caller in callers))) > len(ADAPTERS)
    settle(server)


def settle(server: Server) -> None:
    """Afterwards nothing runs, nothing leaks, and the server serves."""
    wait_for(lambda: not server.engine()["running"], 10, "an empty engine")
    for name in ADAPTERS:
        assert server.remove(name).status in (200, 404)
    wait_for(lambda: not server.engine()["held"], 10, "an engine without adapters")
    assert server.get("/adapters").json()["adapters"] == []
    assert server.metric("lorahost_inflight") == 0
    assert server.metric("lorahost_queued") == 0
    assert server.get("/ping").status == 200
    assert server.invoke().status == 200
    assert [line for line in server.log_lines() if "Traceback" in line.get("error", "")] == []
