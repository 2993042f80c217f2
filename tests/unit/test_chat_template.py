"""An adapter's own chat template travels with its weights and is part of its version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorahost.adapters import chat_template
from lorahost.engine.vllm_026.arguments import fallback_chat_template, prepare_environment
from lorahost.errors import AdapterRejectedError


def test_a_file_of_its_own_wins_over_the_tokenizers(tmp_path: Path) -> None:
    assert chat_template.read(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "inside"}))
    assert chat_template.read(tmp_path) == "inside"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert chat_template.read(tmp_path) == "own"


def test_it_is_carried_and_changes_the_digest(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    assert chat_template.digest_with("d", source) == "d"
    (source / "chat_template.jinja").write_text("own")
    first = chat_template.digest_with("d", source)
    chat_template.carry(source, target)
    assert chat_template.read(target) == "own"
    (source / "chat_template.jinja").write_text("other")
    assert len({"d", first, chat_template.digest_with("d", source)}) == 3


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("chat_template.jinja", b"x" * (chat_template.MAX_BYTES + 1), "chat_template_too_large"),
        ("chat_template.jinja", b"\xff\xfe", "bad_chat_template"),
        ("tokenizer_config.json", b"{", "bad_tokenizer_config"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, file: str, content: bytes, code: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(AdapterRejectedError) as refused:
        chat_template.read(tmp_path)
    assert refused.value.code == code


def test_the_variable_is_for_a_base_model_without_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_TEMPLATE", "fallback")
    assert fallback_chat_template(str(tmp_path), []) == ["--chat-template", "fallback"]
    assert fallback_chat_template(str(tmp_path), ["--chat-template", "x"]) == []
    (tmp_path / "chat_template.jinja").write_text("own")
    assert fallback_chat_template(str(tmp_path), []) == []


def test_internal_ports_come_from_sagemakers_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_SAFE_PORT_RANGE", "21000-21999")
    for name in ("VLLM_PORT", "VLLM_HOST_IP", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    import os

    prepare_environment(str(tmp_path))
    assert os.environ["VLLM_PORT"] == "21000"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
