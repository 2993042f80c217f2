"""`EngineHost` on vLLM 0.26.0's AsyncLLM and its own OpenAI serving classes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError

from lorahost.core import AdapterVersion, EngineCall, EngineHealth, EngineInfo, Json
from lorahost.engine.vllm_026 import VLLM_VERSION, arguments
from lorahost.engine.vllm_026.adapters import EngineAdapters, prove_plugin, wrapped_modules
from lorahost.engine.vllm_026.answers import host_error, is_error_event, validation_error
from lorahost.errors import HostError, UnavailableError

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
        self._adapters: EngineAdapters
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
        from lorahost.engine.vllm_026.signatures import check_signatures

        if vllm.__version__.split("+")[0] != VLLM_VERSION:
            raise UnavailableError(f"vllm is {vllm.__version__}; this server is built for {VLLM_VERSION}")
        check_signatures()
        args = arguments.parse(self._line)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._progress = Progress()
        self._engine = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[progress_logger(self._progress)],
        )
        await self._engine.reset_mm_cache()
        reports = await prove_plugin(self._engine) if self._lora_enabled else []
        self._state = State()
        await init_app_state(self._engine, self._state, args, ("generate",))
        # answers carry the public name of who serves them; the engine's own name carries the digest
        self._state.openai_serving_models.model_name = lambda lora_request=None: _served_name.get()
        self._trust_adapter_templates(self._state.online_renderer)
        self._adapters = EngineAdapters(
            self._engine, self._state.openai_serving_models, self._load_timeout_s, self._busy
        )
        modules = await wrapped_modules(self._engine) if self._lora_enabled else frozenset()
        await self.probe(None)
        return self._info(config, reports, modules)

    @staticmethod
    def _trust_adapter_templates(renderer: Any) -> None:
        """vLLM takes a template in a request only if it trusts all of them; an adapter's own came with its weights."""
        check = renderer.validate_chat_template

        def validate(request_chat_template: str | None, **options: Any) -> Any:
            own = _adapter_template.get()
            checked = None if own is not None and request_chat_template == own else request_chat_template
            return check(request_chat_template=checked, **options)

        renderer.validate_chat_template = validate

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

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """One operation that the engine must answer; its end is progress, as a step is."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._progress.steps += 1

    async def generate(self, call: EngineCall) -> Json | AsyncIterator[str]:
        """See `EngineHost.generate`."""
        request = self._request(call)
        _served_name.set(call.served_name)
        serving = self._state.openai_serving_chat if call.api == "chat" else self._state.openai_serving_completion
        create = serving.create_chat_completion if call.api == "chat" else serving.create_completion
        self._running += 1
        try:
            answer = await create(request)
        except HostError:
            raise
        except Exception as error:
            raise host_error(error, self._engine) from error
        finally:
            self._running -= 1
        if hasattr(answer, "__aiter__"):
            return self._events(answer)
        if hasattr(answer, "error"):
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                # vLLM turns a cancelled request into an error answer
                raise asyncio.CancelledError
            raise host_error(answer, self._engine)
        dumped: Json = answer.model_dump()
        return dumped

    async def _events(self, answer: Any) -> AsyncIterator[str]:
        """The SSE events as they come; an error event of vLLM's becomes an exception."""
        self._running += 1
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
        template = self._adapters.chat_template(call.version) if call.version and call.api == "chat" else None
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
        """See `AdapterEngine.load`."""
        return await self._adapters.load(version)

    async def unload(self, engine_id: int) -> None:
        """See `AdapterEngine.unload`."""
        await self._adapters.unload(engine_id)

    async def loaded(self) -> frozenset[int]:
        """See `AdapterEngine.loaded`."""
        return await self._adapters.loaded()

    async def probe(self, version: AdapterVersion | None) -> tuple[float, ...]:
        """See `AdapterEngine.probe`."""
        return await self._adapters.probe(version)

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
