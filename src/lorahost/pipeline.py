"""The life of one generation on the engine's loop: lease, admission, engine, answer, account."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from lorahost.account import CLIENT_GONE_STATUS, Account
from lorahost.admission import BASE, Admission
from lorahost.core import AdapterVersion, Api, EngineCall, EngineHost, Json
from lorahost.errors import AdapterConflictError, OverloadedError
from lorahost.formats import DONE_EVENT, Assembly, usage_of
from lorahost.logs import request_line
from lorahost.metrics import Metrics

log = logging.getLogger(__name__)


class Lease(Protocol):
    """A pinned adapter version; `on_revoke` is called when a removal won't wait any longer."""

    revoked: bool

    @property
    def version(self) -> AdapterVersion: ...

    def on_revoke(self, callback: Callable[[], Any]) -> None: ...

    def release(self) -> None: ...


class Adapters(Protocol):
    """Where leases come from."""

    async def acquire(self, name: str) -> Lease: ...


@dataclass(frozen=True, slots=True)
class Task:
    """One request as the pipeline sees it.

    Attributes:
        calls: OpenAI api and body; more than one only for answers that are not streamed.
        adapter: Registered adapter name, or None for the base model.
        served_name: What `model` says in the answer.
        deadline_s: Seconds from the request's arrival after which the answer ends with what there is, or None.
    """

    calls: tuple[tuple[Api, Json], ...]
    adapter: str | None
    served_name: str
    request_id: str
    deadline_s: float | None = None


class Pipeline:
    """Runs tasks; one for the whole server, on the engine's loop."""

    def __init__(self, engine: EngineHost, adapters: Adapters, admission: Admission, metrics: Metrics) -> None:
        self._engine = engine
        self._adapters = adapters
        self._admission = admission
        self._metrics = metrics

    async def whole(self, task: Task, account: Account) -> tuple[list[Json], AdapterVersion | None]:
        """All of the task's answers, and the adapter version that gave them."""
        async with _Admitted(self, task, account) as version:
            end = _end(task, account)
            answers = await _all([self._one(task, call, version, end) for call in task.calls])
        for answer in answers:
            account.take_usage(answer.get("usage"))
        if account.transcript is not None:
            account.transcript.add_answers(answers)
        return answers, version

    async def _one(self, task: Task, call: tuple[Api, Json], version: AdapterVersion | None, end: float | None) -> Json:
        api, body = call
        if end is None:
            answer = await self._engine.generate(self._call(task, api, {**body, "stream": False}, version))
            assert isinstance(answer, dict)
            return answer
        assembly = Assembly(api, _shell(task))
        # usage with every chunk: the answer may have to end after any of them
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = {**body, "stream": True, "stream_options": options}
        try:
            async with aclosing(self._events(self._call(task, api, streamed, version), end)) as events:
                async for event in events:
                    assembly.add(event)
        except TimeoutError:
            log.info("deadline reached", extra={"request_id": task.request_id, "deadline_s": task.deadline_s})
        return assembly.whole("length")

    @staticmethod
    def _call(task: Task, api: Api, body: Json, version: AdapterVersion | None) -> EngineCall:
        return EngineCall(api, body, version, task.served_name, task.request_id)

    async def _events(self, call: EngineCall, end: float | None) -> AsyncGenerator[str, None]:
        """The engine's events up to its last; raises TimeoutError at `end`, a time of `time.monotonic`."""
        async with asyncio.timeout(_left(end)):
            events = await self._engine.generate(call)
        assert not isinstance(events, dict)
        try:
            event = ""
            while event != DONE_EVENT:
                # not `wait_for`: an iterator that never began would not know that it was closed
                async with asyncio.timeout(_left(end)):
                    event = await anext(events)
                yield event
        except StopAsyncIteration:
            return
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    async def stream(
        self, task: Task, account: Account, open_: Callable[[AdapterVersion | None], None]
    ) -> AsyncGenerator[str, None]:
        """The engine's SSE events; usage is taken into account, and hidden unless the client asked for it.

        `open_` is called before the first event with the version that makes them.
        """
        [(api, body)] = task.calls
        asked = body.get("stream_options") or {}
        streamed = {**body, "stream": True, "stream_options": {**asked, "include_usage": True}}
        assembly = None if task.deadline_s is None else Assembly(api, _shell(task))
        async with _Admitted(self, task, account) as version:
            open_(version)
            call = self._call(task, api, streamed, version)
            try:
                async with aclosing(self._events(call, _end(task, account))) as events:
                    async for event in events:
                        if usage := usage_of(event):
                            account.take_usage(usage)
                            if not asked.get("include_usage"):
                                continue
                        self._observe_event(account)
                        if assembly is not None:
                            assembly.add(event)
                        if account.transcript is not None:
                            account.transcript.add_event(event)
                        yield event
            except TimeoutError:
                assert assembly is not None
                if closing := assembly.closing(task.served_name, "length"):
                    yield closing
                yield DONE_EVENT

    def _observe_event(self, account: Account) -> None:
        now = time.monotonic()
        if account.first_token is None:
            account.first_token = now
            self._metrics.ttft.labels(account.label).observe(now - account.started)
        elif account.last_event is not None:
            self._metrics.gap.labels(account.label).observe(now - account.last_event)
        account.last_event = now

    def finish(self, account: Account) -> None:
        """Counts and logs a finished request."""
        label = account.label
        self._metrics.requests.labels(label, str(account.code)).inc()
        self._metrics.tokens.labels(label, "prompt").inc(account.prompt_tokens)
        self._metrics.tokens.labels(label, "output").inc(account.output_tokens)
        if account.code == CLIENT_GONE_STATUS:
            self._metrics.aborted.labels(label).inc()
        request_line(account.line())


class _Admitted:
    """A lease on the adapter's version and a place in the engine, for the length of a `with`."""

    def __init__(self, pipeline: Pipeline, task: Task, account: Account) -> None:
        self._pipeline = pipeline
        self._task = task
        self._account = account
        self._lease: Lease | None = None

    async def __aenter__(self) -> AdapterVersion | None:
        deadline_s = self._task.deadline_s
        try:
            async with asyncio.timeout(_left(_end(self._task, self._account))) as limit:
                return await self._enter()
        except TimeoutError:
            if not limit.expired():
                raise
            raise OverloadedError(
                f"the request was still waiting for the engine when its deadline_s of {deadline_s:g} had passed",
                code="deadline_in_queue",
                param="deadline_s",
                retry_after_s=1,
            ) from None

    async def _enter(self) -> AdapterVersion | None:
        pipeline, account = self._pipeline, self._account
        if self._task.adapter is not None:
            self._lease = await pipeline._adapters.acquire(self._task.adapter)
            current = asyncio.current_task()
            assert current is not None
            self._lease.on_revoke(current.cancel)
        version = self._lease.version if self._lease else None
        account.version = version.digest[:12] if version else None
        arrived = time.monotonic()
        try:
            await pipeline._admission.enter(version.engine_id if version else BASE)
        except BaseException as error:
            self._release(error)
            raise
        account.queue_s = time.monotonic() - arrived
        pipeline._metrics.queue.labels(account.label).observe(account.queue_s)
        return version

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        lease = self._lease
        self._pipeline._admission.leave(lease.version.engine_id if lease else BASE)
        self._release(error)

    def _release(self, error: BaseException | None) -> None:
        """Gives the lease back; a request that was cancelled because its adapter goes is told so."""
        lease = self._lease
        if lease is None:
            return
        lease.release()
        if lease.revoked and isinstance(error, asyncio.CancelledError | GeneratorExit):
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
            raise AdapterConflictError(
                f"adapter {self._task.adapter!r} was removed and this request took longer than its drain time",
                code="adapter_removed",
            )


def _shell(task: Task) -> Json:
    return {"id": task.request_id, "created": int(time.time()), "model": task.served_name}


def _end(task: Task, account: Account) -> float | None:
    return None if task.deadline_s is None else account.started + task.deadline_s


def _left(end: float | None) -> float | None:
    return None if end is None else end - time.monotonic()


async def _all(work: list[Coroutine[Any, Any, Json]]) -> list[Json]:
    """Runs all at once; the first failure stops the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
