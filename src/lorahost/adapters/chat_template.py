"""An adapter's own chat template: a fine-tune on another prompt format answers badly without it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lorahost.errors import AdapterRejectedError

FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_BYTES = 1 << 18


def read(directory: Path) -> str | None:
    """The template in `directory`: `chat_template.jinja`, or the one inside `tokenizer_config.json`.

    Raises:
        AdapterRejectedError: it is too large, or not text.
    """
    own = directory / FILE
    if own.is_file():
        return _text(own)
    config = directory / TOKENIZER_CONFIG
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text())
    except ValueError as error:
        raise AdapterRejectedError(f"{TOKENIZER_CONFIG} is not JSON: {error}", code="bad_tokenizer_config") from error
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None


def _text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise AdapterRejectedError(
            f"{path.name} has {size} bytes; the limit is {MAX_BYTES}", code="chat_template_too_large"
        )
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise AdapterRejectedError(f"{path.name} is not UTF-8: {error}", code="bad_chat_template") from error


def carry(source: Path, target: Path) -> None:
    """Puts the source's template into the normalised adapter, whence the engine's host reads it."""
    template = read(source)
    if template is not None:
        (target / FILE).write_text(template)


def digest_with(digest: str, source: Path) -> str:
    """The version's digest: a template change is a new version, too."""
    template = read(source)
    return digest if template is None else hashlib.sha256(f"{digest}\0{template}".encode()).hexdigest()
