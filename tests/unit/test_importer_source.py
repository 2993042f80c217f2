"""Where an adapter's files may lie, how large they may be, and what identifies them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.importer_support import (
    GOOD,
    LIMITS,
    make_config,
    make_layout,
    random_pair,
    refused,
    write_adapter,
)
from tests.unit.importer_support import (
    QWEN3_EXPERTS as EXPERTS,
)
from tests.unit.importer_support import (
    QWEN3_Q as Q,
)

from lorahost.adapters.importer import digest_of, import_adapter
from lorahost.errors import AdapterConflictError

LAYOUT = make_layout(make_config("Qwen3Moe"))


def test_sizes(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    size = sum(p.stat().st_size for p in source.iterdir())
    error = refused(source, tmp_path, limits=LIMITS.model_copy(update={"max_bytes": size - 1}))
    assert error.code == "artifact_too_large"
    assert error.details == {"bytes": size, "max_bytes": size - 1}
    # One expert of rank 16 makes all experts of its layer that large.
    tensors = random_pair(f"{EXPERTS}.0.up_proj", 64, 24, r=16)
    error = refused(
        write_adapter(tmp_path / "b", tensors, r=16), tmp_path, limits=LIMITS.model_copy(update={"max_bytes": 60_000})
    )
    assert error.details["bytes"] == 4 * 16 * 4 * 3 * (64 + 24)


def test_directories(tmp_path: Path) -> None:
    assert refused(tmp_path / "none", tmp_path).code == "source_not_found"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty", tmp_path).code == "config_missing"
    write_adapter(tmp_path / "two" / "x", GOOD)
    assert import_adapter(tmp_path / "two", tmp_path / "t", LAYOUT, LIMITS).modules == {Q}
    write_adapter(tmp_path / "two" / "y", GOOD)
    error = refused(tmp_path / "two", tmp_path)
    assert (error.code, "x, y" in error.message) == ("config_ambiguous", True)


def test_pickles_and_missing_weights(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    (source / "adapter_model.safetensors").unlink()
    assert refused(source, tmp_path).code == "weights_missing"
    (source / "adapter_model.bin").write_bytes(b"\x80\x02.")
    error = refused(source, tmp_path)
    assert (error.code, "adapter_model.bin" in error.message) == ("pickle_weights", True)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_directory(file: str, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    (source / file).rename(tmp_path / "elsewhere")
    (source / file).symlink_to(tmp_path / "elsewhere")
    assert refused(source, tmp_path).code == "link_outside_source"
    # A link that stays inside is fine.
    (source / file).unlink()
    (tmp_path / "elsewhere").rename(source / "blob")
    (source / file).symlink_to("blob")
    assert import_adapter(source, tmp_path / "t", LAYOUT, LIMITS).modules == {Q}


def test_special_files(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    (source / "adapter_model.safetensors").unlink()
    os.mkfifo(source / "adapter_model.safetensors")
    assert refused(source, tmp_path).code == "not_a_file"


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 100_000])
def test_config_that_is_no_object(text: str, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    (source / "adapter_config.json").write_text(text)
    assert refused(source, tmp_path).code == "invalid_config"


def test_existing_target_is_kept(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    import_adapter(source, tmp_path / "t", LAYOUT, LIMITS)
    before = digest_of(tmp_path / "t")
    with pytest.raises(AdapterConflictError, match="exists"):
        import_adapter(source, tmp_path / "t", LAYOUT, LIMITS)
    assert digest_of(tmp_path / "t") == before


def test_several_weight_files(tmp_path: Path) -> None:
    k = "model.layers.0.self_attn.k_proj"
    source = write_adapter(tmp_path / "a", GOOD)
    (source / "adapter_model.safetensors").rename(source / "adapter_model-00001-of-00002.safetensors")
    write_adapter(source, random_pair(k, 64, 32))
    (source / "adapter_model.safetensors").rename(source / "adapter_model-00002-of-00002.safetensors")
    assert import_adapter(source, tmp_path / "t", LAYOUT, LIMITS).modules == {Q, k}
    write_adapter(source, GOOD)
    assert refused(source, tmp_path).code == "duplicate_tensor"


def test_digest_sees_both_files_and_nothing_else(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", GOOD)
    digest = digest_of(source)
    assert digest == digest_of(write_adapter(tmp_path / "nested" / "b", GOOD).parent)
    (source / "README.md").write_text("hello")
    assert digest_of(source) == digest
    config = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    assert digest_of(source) != digest
    write_adapter(source, {k: v * 2 for k, v in GOOD.items()})
    assert digest_of(source) != digest
