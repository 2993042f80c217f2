"""What the start says before anything runs: the settings, secrets masked, and what is worth a warning."""

from __future__ import annotations

import json
import re
from typing import Any

from lorahost import server_flags
from lorahost.environment import EngineFlags
from lorahost.settings import Settings
from lorahost.transcript import MAX_CHARS

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY")
URL_PASSWORD = re.compile(r"://[^/@\s]+@")


def warnings(settings: Settings, flags: EngineFlags) -> list[str]:
    """A sentence for each setting that does less, or more, than its reader may think."""
    found = [f"{name} is unknown and ignored" for name in flags.unknown]
    found += [f"{name} has no effect: it sets vLLM's own HTTP server" for name in server_flags.ignored(flags)]
    if settings.log_prompts:
        found.append(
            f"LORAHOST_LOG_PROMPTS is on: prompts and answers are in the request log, {MAX_CHARS} characters of each"
        )
    return found


def shown_environment(settings: Settings, flags: EngineFlags) -> dict[str, Any]:
    """The settings for the start-up log, secrets masked."""
    shown = {k: _mask(k, v) if isinstance(v, str) else v for k, v in settings.model_dump(mode="json").items()}
    flag, tokens = "", []
    for token in flags.tokens:
        flag = token if token.startswith("--") else flag
        tokens.append(token if token == flag else _mask(flag, token))
    return {"settings": shown, "vllm": tokens, "unknown": list(flags.unknown)}


def _mask(name: str, value: str) -> str:
    """Hides values whose name says secret, in JSON too, and the user part of URLs; token counts are no secrets."""
    if value and _secret(name):
        return "***"
    if value.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_masked_json(json.loads(value)))
        except json.JSONDecodeError:
            pass
    return URL_PASSWORD.sub("://***@", value)


def _masked_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _secret(k) and isinstance(v, str) else _masked_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_masked_json(v) for v in value]
    return URL_PASSWORD.sub("://***@", value) if isinstance(value, str) else value


def _secret(name: str) -> bool:
    upper = name.upper().replace("-", "_")
    return any(w in upper for w in SECRET_WORDS) and not any(c in upper for c in ("TOKENS", "TOKENIZER"))
