"""Local sources and what is wrong with them."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from lorahost.adapters.fetch import SourceFetcher
from lorahost.adapters.source_files import SourceLimits
from lorahost.errors import AdapterRejectedError, InvalidRequestError


def make_adapter(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def rejected(fetcher: SourceFetcher, src: str, into: Path) -> AdapterRejectedError:
    with pytest.raises(AdapterRejectedError) as caught:
        fetcher.fetch(src, into)
    assert src in caught.value.message
    assert caught.value.status == 424
    assert caught.value.param == "src"
    return caught.value


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "into"


@pytest.mark.parametrize("nested", ["", "checkpoint-1"])
@pytest.mark.parametrize("scheme", ["", "file://", "file://localhost"])
def test_a_directory_is_used_in_place(nested: str, scheme: str, tmp_path: Path, into: Path) -> None:
    adapter = make_adapter(tmp_path / "my adapter" / nested)
    (tmp_path / "my adapter" / ".cache").mkdir()
    src = scheme + str(tmp_path / "my adapter").replace(" ", "%20" if scheme else " ")
    assert SourceFetcher().fetch(src, into) == adapter
    assert list(into.iterdir()) == []


@pytest.mark.parametrize(("suffix", "mode"), [(".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar", "w")])
def test_an_archive_is_unpacked(suffix: str, mode: str, tmp_path: Path, into: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    archive = tmp_path / f"a{suffix}"
    with tarfile.open(archive, mode) as tar:
        tar.add(adapter, arcname="nested")
    found = SourceFetcher().fetch(str(archive), into)
    assert found.is_relative_to(into)
    assert (found / "adapter_model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    "src",
    [
        "org/adapter",
        "./adapter",
        "~/adapter",
        "hf://org/adapter",
        "https://host/a.tar.gz",
        "file://host/adapter",
        "file:relative",
        "file:///a/../b",
        "file:///a/%2e%2e/b",
        "/opt/ml/../secret",
        "/a\0b",
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket//a.tar.gz",
        "s3://bucket/../other/a.tar.gz",
        "s3:/bucket/a",
    ],
)
def test_other_forms_are_bad_requests(src: str, into: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SourceFetcher().fetch(src, into)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "bad_source", "src")
    assert repr(src) in error.message
    assert "s3://bucket/prefix/" in error.message


def test_a_file_that_is_no_archive(tmp_path: Path, into: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(InvalidRequestError, match="no archive"):
        SourceFetcher().fetch(str(tmp_path / "a.zip"), into)


@pytest.mark.parametrize("src", ["/absent/adapter", "/absent/adapter.tar.gz", "/etc/hostname/below"])
def test_an_absent_source(src: str, into: Path) -> None:
    assert rejected(SourceFetcher(), src, into).code == "artifact_missing"


def test_roots_hold_against_links(tmp_path: Path, into: Path) -> None:
    inside, outside = make_adapter(tmp_path / "root/a"), make_adapter(tmp_path / "other/a")
    (tmp_path / "root/link").symlink_to(outside)
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    fetcher = SourceFetcher(roots=[tmp_path / "alias"])
    assert fetcher.fetch(str(inside), into) == inside
    for src in (outside, tmp_path / "root/link", tmp_path / "rooted", tmp_path):
        with pytest.raises(InvalidRequestError) as caught:
            fetcher.fetch(str(src), into)
        assert caught.value.code == "source_not_allowed"
        assert str(tmp_path / "alias") in caught.value.message


def test_a_link_to_a_file_elsewhere(tmp_path: Path, into: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "w").write_bytes(b"weights")
    adapter = make_adapter(tmp_path / "snapshots/a")
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to(blobs / "w")
    error = rejected(SourceFetcher(), str(adapter), into)
    assert error.code == "link_outside_source"
    assert str(blobs / "w") in error.message
    assert SourceFetcher(roots=[tmp_path]).fetch(str(adapter), into) == adapter


def test_configuration_missing_or_ambiguous(tmp_path: Path, into: Path) -> None:
    top = tmp_path / "top"
    make_adapter(top / "deep/deeper")
    assert rejected(SourceFetcher(), str(top), into).code == "config_missing"
    make_adapter(top / "one")
    assert SourceFetcher().fetch(str(top), into) == top / "one"
    make_adapter(top / "two")
    error = rejected(SourceFetcher(), str(top), into)
    assert error.code == "config_ambiguous"
    assert "'one', 'two'" in error.message


@pytest.mark.parametrize(("name", "code"), [("adapter_model.bin", "pickle_weights"), ("w.txt", "weights_missing")])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_must_be_safetensors(name: str, code: str, packed: bool, tmp_path: Path, into: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    src = adapter
    if packed:
        src = tmp_path / "a.tar.gz"
        with tarfile.open(src, "w:gz") as tar:
            tar.add(adapter, arcname=".")
    error = rejected(SourceFetcher(), str(src), into)
    assert error.code == code


def test_a_directory_beyond_the_limits(tmp_path: Path, into: Path) -> None:
    adapter = make_adapter(tmp_path / "a", bytes(1000))
    (adapter / "optimizer.pt").write_bytes(bytes(5000))
    assert SourceFetcher(limits=SourceLimits(max_bytes=1002)).fetch(str(adapter), into) == adapter
    error = rejected(SourceFetcher(limits=SourceLimits(max_bytes=1001)), str(adapter), into)
    assert error.code == "artifact_too_large"
    assert "1001" in error.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_without_permission(tmp_path: Path, into: Path) -> None:
    adapter = make_adapter(tmp_path / "a")
    adapter.chmod(0)
    try:
        assert rejected(SourceFetcher(), str(adapter), into).code == "artifact_unreadable"
    finally:
        adapter.chmod(0o755)
