"""Every name of vLLM that this package uses, with what it is given and what is read from it; checked at the start.

Another vLLM is then refused with a list of what differs, and a move to it is a change in this package alone. A test
compares the tables with the code.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from lorahost.engine.vllm_026 import VLLM_VERSION
from lorahost.errors import UnavailableError

# `module:name` -> the parameters that we pass, which must be there and suffice; None where nothing is called.
NAMES: dict[str, str | None] = {
    "vllm:__version__": None,
    "vllm:SamplingParams": "max_tokens temperature logprobs ignore_eos",
    "vllm.inputs:tokens_input": "prompt_token_ids",
    "vllm.platforms:current_platform": None,
    "vllm.platforms.interface:Platform.is_cuda": "",
    "vllm.platforms.interface:Platform.get_device_total_memory": "",
    "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path",
    "vllm.usage.usage_lib:UsageContext.OPENAI_API_SERVER": None,
    "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": "args",
    "vllm.utils.argparse_utils:FlexibleArgumentParser.error": "message",
    "vllm.utils.argparse_utils:FlexibleArgumentParser.exit": "status message",
    "vllm.entrypoints.openai.cli_args:make_arg_parser": "parser",
    "vllm.entrypoints.openai.cli_args:validate_parsed_serve_args": "args",
    "vllm.entrypoints.openai.api_server:validate_api_server_args": "args",
    "vllm.reasoning:ReasoningParserManager.import_reasoning_parser": "plugin_path",
    "vllm.tool_parsers:ToolParserManager.import_tool_parser": "plugin_path",
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": "args",
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": "usage_context",
    "vllm.entrypoints.openai.api_server:init_app_state": "engine_client state args supported_tasks",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.model_name": "lora_request",
    "vllm.renderers.online_renderer:OnlineRenderer.validate_chat_template": (
        "request_chat_template chat_template_kwargs trust_request_chat_template"
    ),
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.model_validate": "obj",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion": "request",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.model_validate": "obj",
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion": "request",
    "vllm.entrypoints.openai.engine.protocol:ErrorResponse.model_validate": "obj",
    "vllm.entrypoints.serve.utils.error_response:create_error_response": "message",
    "vllm.v1.engine.exceptions:EngineDeadError": None,
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": "vllm_config usage_context stat_loggers",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "prompt sampling_params request_id lora_request",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": "method args",
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": "lora_request",
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora": "lora_id",
    "vllm.v1.engine.async_llm:AsyncLLM.list_loras": "",
    "vllm.v1.engine.async_llm:AsyncLLM.reset_mm_cache": "",
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": "timeout",
    "vllm.v1.engine.async_llm:AsyncLLM.errored": None,
    "vllm.v1.metrics.loggers:StatLoggerBase.__init__": "vllm_config engine_index",
    "vllm.v1.metrics.loggers:StatLoggerBase.record": "scheduler_stats iteration_stats mm_cache_stats engine_idx",
    "vllm.v1.metrics.loggers:StatLoggerBase.log_engine_initialized": "",
}

# `module:class or function` -> attributes that we read, which only its source shows.
ATTRIBUTES: dict[str, str] = {
    "vllm.entrypoints.openai.api_server:init_app_state": "openai_serving_models online_renderer",
    "vllm.entrypoints.generate.api_router:init_generate_state": "openai_serving_chat openai_serving_completion",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": "base_model_paths lora_requests",
    "vllm.entrypoints.openai.models.protocol:BaseModelPath": "name",
    "vllm.entrypoints.openai.engine.protocol:ErrorResponse": "error",
    "vllm.entrypoints.openai.engine.protocol:ErrorInfo": "code message param",
    "vllm.config:VllmConfig": "lora_config device_config model_config scheduler_config",
    "vllm.config:LoRAConfig": "max_loras max_lora_rank max_cpu_loras lora_dtype",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:ModelConfig": "max_model_len",
    "vllm.config:SchedulerConfig": "max_num_seqs",
    "vllm.lora.request:LoRARequest": "lora_name",
    "vllm.outputs:RequestOutput": "outputs",
    "vllm.outputs:CompletionOutput": "logprobs",
    "vllm.logprobs:Logprob": "logprob",
    "vllm.v1.metrics.stats:IterationStats": "num_generation_tokens num_prompt_tokens",
}


def check_signatures() -> None:
    """Compares the tables with the installed vLLM.

    Raises:
        UnavailableError: with one line per name that is missing or differs.
    """
    problems = [*_name_problems(), *_attribute_problems()]
    if problems:
        raise UnavailableError(
            f"this vLLM is not the {VLLM_VERSION} that the server knows: " + "; ".join(problems),
            code="engine_mismatch",
        )


def resolve(name: str) -> Any:
    """The object that `module:qualified.name` stands for; AttributeError or ImportError when there is none."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _name_problems() -> Iterator[str]:
    for name, passed in NAMES.items():
        try:
            found = resolve(name)
        except (ImportError, AttributeError) as error:
            yield f"{name} is missing ({error})"
            continue
        if passed is None:
            continue
        parameters = inspect.signature(found).parameters
        named = set(passed.split())
        if gone := named - set(parameters):
            yield f"{name} has no parameter {', '.join(sorted(gone))}"
        if new := {p.name for p in parameters.values() if _required(p)} - named - {"self", "cls"}:
            yield f"{name} needs {', '.join(sorted(new))}"


def _required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _attribute_problems() -> Iterator[str]:
    for name, attributes in ATTRIBUTES.items():
        try:
            source = _source(resolve(name))
        except (ImportError, AttributeError, OSError) as error:
            yield f"{name} is missing ({error})"
            continue
        for attribute in attributes.split():
            pattern = rf"\b(self|state)\.{attribute}\b.*=|def {attribute}\(|^    {attribute}: "
            if not re.search(pattern, source, re.MULTILINE):
                yield f"{name} has no {attribute}"


def _source(found: Any) -> str:
    """Source of a function, or of a class and its bases inside vLLM."""
    parts = (
        [base for base in found.__mro__ if base.__module__.startswith("vllm")] if inspect.isclass(found) else [found]
    )
    return "\n".join(inspect.getsource(part) for part in parts)
