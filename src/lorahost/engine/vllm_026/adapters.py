"""Adapters in the engine: loading off the hot path, proof by the workers, real removal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lorahost.adapters import chat_template
from lorahost.core import AdapterVersion, Json
from lorahost.errors import AdapterRejectedError, CapacityError, EngineFailedError, HostError, UnavailableError

log = logging.getLogger(__name__)
PROBE_TOKENS = (1, 2, 3, 5, 8, 13)
PREPARE_POLL_S = 0.02


class EngineAdapters:
    """The adapters that one AsyncLLM holds; implements `AdapterEngine`.

    Args:
        engine: The AsyncLLM.
        models: vLLM's table of served models, by which its serving classes find an adapter.
        load_timeout_s: Seconds that reading one adapter may take in the workers.
        busy: Counts one operation of the engine while it is open; a hung engine is seen by it.
    """

    def __init__(
        self, engine: Any, models: Any, load_timeout_s: float, busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._engine = engine
        self._models = models
        self._load_timeout_s = load_timeout_s
        self._busy = busy
        self._requests: dict[int, Any] = {}
        self._templates: dict[int, str] = {}

    def chat_template(self, version: AdapterVersion) -> str | None:
        """The adapter's own chat template, if it brought one."""
        return self._templates.get(version.engine_id)

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        """See `AdapterEngine.load`: the workers read in the background, the engine then only copies."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(version.engine_name, version.engine_id, str(version.path))
        try:
            await self._prepare(version)
            with self._busy():
                taken = await self._engine.add_lora(request)
            if not taken or version.engine_id not in await self.loaded():
                raise AdapterRejectedError(f"the engine did not take adapter {version.name!r}", code="engine_refused")
            per_worker = await self._rpc("lorahost_adapter_modules", version.engine_id)
        except BaseException as error:
            await self._undo_load(version.engine_id)
            raise _load_error(version, error) from error
        if (template := chat_template.read(version.path)) is not None:
            self._templates[version.engine_id] = template
        self._requests[version.engine_id] = request
        self._models.lora_requests[version.engine_name] = request
        return frozenset().union(*per_worker)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        with self._busy():
            return list(await self._engine.collective_rpc(method, args=args))

    async def _prepare(self, version: AdapterVersion) -> None:
        await self._rpc("lorahost_prepare_adapter", str(version.path), version.engine_name, version.engine_id)
        deadline = time.monotonic() + self._load_timeout_s
        while True:
            states = await self._rpc("lorahost_prepare_poll", version.engine_id)
            failed = [s for s in states if s["state"] == "failed"]
            if failed:
                raise AdapterRejectedError(
                    f"a worker could not read adapter {version.name!r}: {failed[0].get('error')}",
                    code="engine_refused",
                )
            if all(s["state"] == "ready" for s in states):
                return
            if time.monotonic() > deadline:
                raise AdapterRejectedError(
                    f"reading adapter {version.name!r} took longer than {self._load_timeout_s:g} s",
                    code="load_timeout",
                )
            await asyncio.sleep(PREPARE_POLL_S)

    async def _undo_load(self, engine_id: int) -> None:
        try:
            await self._rpc("lorahost_discard_prepared", engine_id)
            await self._remove(engine_id)
        except Exception:
            log.exception("could not clean up after the failed load of engine id %d", engine_id)

    async def unload(self, engine_id: int) -> None:
        """See `AdapterEngine.unload`."""
        self._templates.pop(engine_id, None)
        request = self._requests.pop(engine_id, None)
        served = self._models.lora_requests
        if request is not None and served.get(request.lora_name) is request:
            del served[request.lora_name]
        await self._remove(engine_id)
        if engine_id in await self.loaded():
            raise EngineFailedError(f"the engine still lists engine id {engine_id} after its removal")

    async def _remove(self, engine_id: int) -> None:
        if engine_id in await self.loaded():
            with self._busy():
                await self._engine.remove_lora(engine_id)

    async def loaded(self) -> frozenset[int]:
        """See `AdapterEngine.loaded`."""
        with self._busy():
            return frozenset(await self._engine.list_loras())

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """See `AdapterEngine.probe`: the five best log-probabilities of the next two tokens, by token id."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        request = self._requests.get(version.engine_id) if version else None
        if version is not None and request is None:
            raise AdapterRejectedError(f"adapter {version.name!r} is not loaded", code="not_loaded")
        params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=5, ignore_eos=True)
        probe_id = f"probe-{version.engine_id if version else 'base'}-{time.monotonic_ns()}"
        final: Any = None
        prompt = tokens_input(list(PROBE_TOKENS))
        with self._busy():
            async for output in self._engine.generate(prompt, params, probe_id, lora_request=request):
                final = output
        steps = final.outputs[0].logprobs
        return tuple(entry.logprob for step in steps for _, entry in sorted(step.items()))


async def prove_plugin(engine: Any) -> list[Json]:
    """Each worker's report; vLLM skips a plugin that fails to import without a word.

    Raises:
        UnavailableError: the plugin is not active in every worker.
    """
    reports = list(await engine.collective_rpc("lorahost_report"))
    inactive = [r for r in reports if not r.get("active")]
    if inactive or not reports:
        raise UnavailableError(
            f"the lorahost plugin is not active in every worker: {inactive or 'no worker answered'}",
            code="plugin_inactive",
        )
    return reports


async def wrapped_modules(engine: Any) -> frozenset[str]:
    """The modules that can hold LoRA weights, by the workers' account."""
    return frozenset(next(iter(await engine.collective_rpc("lorahost_wrapped_modules"))))


def _load_error(version: AdapterVersion, error: BaseException) -> BaseException:
    """What a failed load means for the caller."""
    if isinstance(error, HostError) or not isinstance(error, Exception):
        return error
    text = str(error)
    if "No free lora slots" in text or "out of memory" in text.lower():
        return CapacityError(f"no room in the engine for adapter {version.name!r}: {text}")
    return AdapterRejectedError(f"the engine refused adapter {version.name!r}: {text}", code="engine_refused")
