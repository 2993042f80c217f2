"""`EngineHost` on vLLM 0.26.0's AsyncLLM and its own OpenAI serving classes."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError

from lorahost.adapters import chat_template
from lorahost.core import AdapterVersion, EngineCall, EngineHealth, EngineInfo, Json
from lorahost.engine.vllm_026 import VLLM_VERSION, arguments
from lorahost.engine.vllm_026.answers import host_error, is_error_event, validation_error
from lorahost.errors import (
    AdapterRejectedError,
    CapacityError,
    EngineFailedError,
    HostError,
    UnavailableError,
)

log = logging.getLogger(__name__)
PROBE_TOKENS = (1, 2, 3, 5, 8, 13)
PREPARE_POLL_S = 0.02
_served_name: ContextVar[str] = ContextVar("served_name")
_adapter_template: ContextVar[str | None] = ContextVar("adapter_template", default=None)


class VllmHost:
    """One AsyncLLM engine; all async methods run on the loop that called `start`.

    Args:
        model: Directory or hub id of the base model.
        base_name: Public name of the base model.
        tokens: vLLM flags as the user gave them.
        lora: Defaults for LoRA flags, or None to serve the base model alone.
        load_timeout_s: Seconds that reading one adapter may take in the workers.
    """

    def __init__(
        self,
        *,
        model: str,
        base_name: str,
        tokens: Sequence[str],
        lora: arguments.LoraDefaults | None,
        load_timeout_s: float = 600.0,
    ) -> None:
        self._line = arguments.with_defaults(tokens, model=model, base_name=base_name, lora=lora)
        self._load_timeout_s = load_timeout_s
        self._lora_enabled = lora is not None
        self._engine: Any = None
        self._state: Any = None
        self._requests: dict[int, Any] = {}
        self._templates: dict[int, str] = {}
        self._running = 0
        self._progress: Any = None
        self._stopping = False

    async def start(self) -> EngineInfo:
        """Starts the engine, proves the plugin in every worker, warms up."""
        import vllm
        from starlette.datastructures import State
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.api_server import init_app_state
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from lorahost.engine.vllm_026.progress import Progress, progress_logger

        if vllm.__version__.split("+")[0] != VLLM_VERSION:
            raise UnavailableError(f"vllm is {vllm.__version__}; this server is built for {VLLM_VERSION}")
        args = arguments.parse(self._line)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._progress = Progress()
        self._engine = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[progress_logger(self._progress)],
        )
        await self._engine.reset_mm_cache()
        reports = await self._prove_plugin()
        self._state = State()
        await init_app_state(self._engine, self._state, args, ("generate",))
        # answers carry the public name of who serves them; the engine's own name carries the digest
        self._state.openai_serving_models.model_name = lambda lora_request=None: _served_name.get()
        self._trust_adapter_templates(self._state.online_renderer)
        info = self._info(config, reports, await self._wrapped_modules())
        await self.probe(None)
        return info

    @staticmethod
    def _trust_adapter_templates(renderer: Any) -> None:
        """vLLM takes a template in a request only if it trusts all of them; an adapter's own came with its weights."""
        check = renderer.validate_chat_template

        def validate(request_chat_template: str | None, **options: Any) -> Any:
            own = _adapter_template.get()
            checked = None if own is not None and request_chat_template == own else request_chat_template
            return check(request_chat_template=checked, **options)

        renderer.validate_chat_template = validate

    async def _prove_plugin(self) -> list[Json]:
        """vLLM skips a plugin that fails to import without a word, so each worker must report it."""
        if not self._lora_enabled:
            return []
        reports = list(await self._engine.collective_rpc("lorahost_report"))
        inactive = [r for r in reports if not r.get("active")]
        if inactive or not reports:
            raise UnavailableError(
                f"the lorahost plugin is not active in every worker: {inactive or 'no worker answered'}"
            )
        return reports

    async def _wrapped_modules(self) -> frozenset[str]:
        if not self._lora_enabled:
            return frozenset()
        per_worker = await self._engine.collective_rpc("lorahost_wrapped_modules")
        return frozenset(per_worker[0])

    def _info(self, config: Any, reports: list[Json], modules: frozenset[str]) -> EngineInfo:
        lora = config.lora_config
        return EngineInfo(
            engine=f"vllm {VLLM_VERSION}",
            device=str(config.device_config.device_type),
            base_name=self._base_name,
            max_model_len=config.model_config.max_model_len,
            max_loras=lora.max_loras if lora else 0,
            max_lora_rank=lora.max_lora_rank if lora else 0,
            max_cpu_loras=lora.max_cpu_loras if lora else 0,
            lora_dtype=str(lora.lora_dtype).removeprefix("torch.") if lora else "",
            lora_modules=modules,
            details={"workers": reports, "max_num_seqs": config.scheduler_config.max_num_seqs},
        )

    @property
    def _base_name(self) -> str:
        return str(self._state.openai_serving_models.base_model_paths[0].name)

    async def generate(self, call: EngineCall) -> Json | AsyncIterator[str]:
        """See `EngineHost.generate`."""
        request = self._request(call)
        _served_name.set(call.served_name)
        serving = self._state.openai_serving_chat if call.api == "chat" else self._state.openai_serving_completion
        create = serving.create_chat_completion if call.api == "chat" else serving.create_completion
        self._running += 1
        streaming = False
        try:
            answer = await create(request)
            if hasattr(answer, "__aiter__"):
                streaming = True
                return self._events(answer)
        except HostError:
            raise
        except Exception as error:
            raise host_error(error, self._engine) from error
        finally:
            if not streaming:
                self._running -= 1
        if hasattr(answer, "error"):
            raise host_error(answer, self._engine)
        dumped: Json = answer.model_dump()
        return dumped

    async def _events(self, answer: Any) -> AsyncIterator[str]:
        """The SSE events as they come; an error event of vLLM's becomes an exception."""
        try:
            async with aclosing(answer):
                async for event in answer:
                    if is_error_event(event):
                        raise host_error(event, self._engine)
                    yield event
        except (HostError, GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:
            raise host_error(error, self._engine) from error
        finally:
            self._running -= 1

    def _request(self, call: EngineCall) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        model = call.version.engine_name if call.version else self._base_name
        body = {**call.body, "model": model, "request_id": call.request_id}
        template = self._templates.get(call.version.engine_id) if call.version and call.api == "chat" else None
        _adapter_template.set(template)
        if template is not None:
            body.setdefault("chat_template", template)
        kind = ChatCompletionRequest if call.api == "chat" else CompletionRequest
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            raise validation_error(error, body) from error
        except HostError:
            raise
        except Exception as error:
            raise host_error(error, self._engine) from error

    async def load(self, version: AdapterVersion) -> frozenset[str]:
        """See `AdapterEngine.load`: the workers read in the background, the engine then only copies."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(version.engine_name, version.engine_id, str(version.path))
        try:
            await self._prepare(version)
            if not await self._engine.add_lora(request):
                raise AdapterRejectedError(f"the engine did not take adapter {version.name!r}", code="engine_refused")
            if version.engine_id not in await self.loaded():
                raise AdapterRejectedError(f"the engine does not list adapter {version.name!r}", code="engine_refused")
            per_worker = await self._engine.collective_rpc("lorahost_adapter_modules", args=(version.engine_id,))
        except BaseException as error:
            await self._undo_load(version.engine_id)
            if isinstance(error, HostError | asyncio.CancelledError):
                raise
            if "No free lora slots" in str(error) or "out of memory" in str(error).lower():
                raise CapacityError(f"no room in the engine for adapter {version.name!r}: {error}") from error
            raise AdapterRejectedError(
                f"the engine refused adapter {version.name!r}: {error}", code="engine_refused"
            ) from error
        if (template := chat_template.read(version.path)) is not None:
            self._templates[version.engine_id] = template
        self._requests[version.engine_id] = request
        self._state.openai_serving_models.lora_requests[version.engine_name] = request
        return frozenset().union(*per_worker)

    async def _prepare(self, version: AdapterVersion) -> None:
        args = (str(version.path), version.engine_name, version.engine_id)
        await self._engine.collective_rpc("lorahost_prepare_adapter", args=args)
        deadline = time.monotonic() + self._load_timeout_s
        while True:
            states = await self._engine.collective_rpc("lorahost_prepare_poll", args=(version.engine_id,))
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
            await self._engine.collective_rpc("lorahost_discard_prepared", args=(engine_id,))
            if engine_id in await self.loaded():
                await self._engine.remove_lora(engine_id)
        except Exception:
            log.exception("could not clean up after the failed load of engine id %d", engine_id)

    async def unload(self, engine_id: int) -> None:
        """See `AdapterEngine.unload`."""
        self._templates.pop(engine_id, None)
        request = self._requests.pop(engine_id, None)
        models = self._state.openai_serving_models.lora_requests
        if request is not None and models.get(request.lora_name) is request:
            del models[request.lora_name]
        if engine_id in await self.loaded():
            await self._engine.remove_lora(engine_id)
        if engine_id in await self.loaded():
            raise EngineFailedError(f"the engine still lists engine id {engine_id} after its removal")

    async def loaded(self) -> frozenset[int]:
        """See `AdapterEngine.loaded`."""
        return frozenset(await self._engine.list_loras())

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """See `AdapterEngine.probe`: the five best log-probabilities of the next two tokens, by token id."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        request = self._requests.get(version.engine_id) if version else None
        if version is not None and request is None:
            raise AdapterRejectedError(f"adapter {version.name!r} is not loaded", code="not_loaded")
        params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=5, ignore_eos=True)
        prompt = tokens_input(list(PROBE_TOKENS))
        probe_id = f"probe-{version.engine_id if version else 'base'}-{time.monotonic_ns()}"
        final: Any = None
        async for output in self._engine.generate(prompt, params, probe_id, lora_request=request):
            final = output
        steps = final.outputs[0].logprobs
        return tuple(entry.logprob for step in steps for _, entry in sorted(step.items()))

    def health(self) -> EngineHealth:
        """See `EngineHost.health`."""
        tokens = self._progress.steps if self._progress else 0
        if self._engine is None:
            return EngineHealth(alive=True, running=0, tokens=0, reason="the engine is starting")
        dead = self._engine.errored and not self._stopping
        return EngineHealth(not dead, self._running, tokens, "the engine process died" if dead else "")

    async def stop(self) -> None:
        """See `EngineHost.stop`."""
        self._stopping = True
        if self._engine is not None:
            self._engine.shutdown(timeout=0)


def base_config(model: str) -> Json:
    """The base model's `config.json`, as vLLM itself resolves it (a directory, or a hub id in the cache)."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(model, local_files_only=bool(os.environ.get("HF_HUB_OFFLINE")))
    return dict(config)
