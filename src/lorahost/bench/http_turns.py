"""A server that is measured in turn with other engines on its GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import aiohttp

from lorahost.bench import http_client, serve, turn_side
from lorahost.bench.http_server import running, target_of
from lorahost.bench.loads import Load
from lorahost.bench.point import Point
from lorahost.bench.timings import Record
from lorahost.bench.vllm_026.engine import WrongEngineError


class Front:
    """Asks a server what `Engine` asks an engine, with the same prompts."""

    def __init__(self, point: Point, url: str, http: aiohttp.ClientSession) -> None:
        self._point = point
        self._url = url
        self._http = http

    async def round(
        self, load: Load, requests: int, seed: int, *, names: list[str] | None = None, output: int = 0
    ) -> list[Record]:
        """See `Engine.round`."""
        point = self._point
        target = target_of(point, self._url, output or point.output)
        plan = serve.Plan(
            names or point.names, point.input, load, requests, choice=point.choice,
            vocab=point.shape.vocab, alphabet=point.alphabet, seed=point.seed,
        )  # fmt: skip
        prompts = await serve.prompts_for(self._http, target, plan)
        return await serve.send_round(self._http, target, plan, prompts, load, requests, seed)


async def take_turns(point: Point, work: Path, folder: Path, log: Path, where: Mapping[str, str]) -> None:
    """Starts the server, loads its adapters, warms it, then answers asks in `folder`; see `turns`.

    Args:
        point: The engine, and in `loads` all that it will be asked.
        work: Folder of the model and the adapters, which others share.
        folder: Where the parent asks; the server keeps its own files in it.
        log: File that gets the server's output.
        where: The rows' provenance.

    Raises:
        ServerEndedError: as in `running`, or all requests of a repeat failed; with the end of the server's log.
    """
    # the parent ends this process's group, the server with it
    started = running(point, work, home=folder / "server", log=log, own_group=False)
    async with started as (server, known), http_client.session() as http:
        try:
            await turn_side.answer(point, Front(point, server.url, http), known, folder, where)
        except WrongEngineError as error:
            raise server.fail(str(error)) from error
