"""vLLM's flags of its own server (`FrontendArgs`, and what its parser adds): which of them mean something here.

HTTP is this package's own, so a flag of vLLM's HTTP server can't do what it says. Where that breaks no promise, the
start warns; where it would (requests without a key are answered, TLS is not spoken), the start is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorahost.environment import EngineFlags

_AUTHENTICATION = "no key is asked for here: leave that to SageMaker's IAM, or to a proxy in front"
_TLS = "no TLS is spoken here: end it in a proxy or load balancer in front"
_CORS = "no CORS headers are sent here: let a proxy in front add them"
# Fields of vLLM's parsed arguments that take part in reading or answering requests here.
USED = frozenset(
    {
        "chat_template", "chat_template_content_format", "trust_request_chat_template",
        "default_chat_template_kwargs", "response_role", "return_tokens_as_token_ids", "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none", "tool_call_parser", "tool_parser_plugin", "max_log_len",
        "enable_prompt_tokens_details", "enable_per_request_metrics", "enable_force_include_usage",
        "enable_log_outputs", "enable_log_deltas", "log_error_stack", "fingerprint_mode", "fingerprint_value",
        "host", "port", "config",
    }
)  # fmt: skip
# Without effect, and nobody relies on it for safety: limits, logs and pages of a server that does not run.
IGNORED = frozenset(
    {
        "data_parallel_supervisor_port", "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold", "uvicorn_log_level", "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints", "log_config_file", "enable_request_id_headers", "disable_fastapi_docs",
        "enable_offline_docs", "h11_max_incomplete_event_size", "h11_max_header_count",
        "enable_flash_late_interaction", "enable_server_load_tracking", "enable_tokenizer_info_endpoint",
        "tool_server", "api_server_count",
    }
)  # fmt: skip
# What the flag promises is not kept; with what to do instead.
REFUSED: Mapping[str, str] = {
    "api_key": _AUTHENTICATION,
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"), _TLS),
    "enable_ssl_refresh": _TLS,
    **dict.fromkeys(("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"), _CORS),
    "middleware": "vLLM's web application does not run here: put what it does into a proxy in front",
    "uds": "this server listens on LORAHOST_HOST and LORAHOST_PORT alone",
    "root_path": "routes begin at / here: let the proxy in front take the prefix off",
    "lora_modules": "adapters come from LORAHOST_ADAPTERS_DIR or POST /adapters",
    "tokens_only": "this server answers in text: it has no token endpoint",
    "headless": "this server always answers HTTP",
    "grpc": "this server answers HTTP only",
}
NOT_HERE = "these set vLLM's own server, which does not run here"
# vLLM's own variable for the same as --api-key
KEY_VARIABLE = "VLLM_API_KEY"


def refusals(environ: Mapping[str, str], flags: EngineFlags) -> list[str]:
    """One sentence a variable whose promise would be broken; `false` promises nothing."""
    found = [f"{name}: {REFUSED[field]}" for name, field in _given(flags) if field in REFUSED]
    if environ.get(KEY_VARIABLE):
        found.append(f"{KEY_VARIABLE}: {_AUTHENTICATION}")
    return found


def ignored(flags: EngineFlags) -> list[str]:
    """Variables of flags that have no effect here."""
    return [name for name, field in _given(flags) if field in IGNORED]


def hidden(args: Any, default: Mapping[str, Any]) -> list[str]:
    """The same as `refusals` of what no variable named: a file of `--config`, or a shortened flag.

    Args:
        args: vLLM's parsed arguments.
        default: What a field is where nothing set it.
    """
    return [
        f"--{field.replace('_', '-')}: {advice}"
        for field, advice in REFUSED.items()
        if getattr(args, field, default[field]) != default[field]
    ]


def _given(flags: EngineFlags) -> list[tuple[str, str]]:
    """(variable, field) of each flag on the command line."""
    given = set(flags.tokens)
    return [(name, flag[2:].replace("-", "_")) for flag, name in flags.sources.items() if flag in given]
