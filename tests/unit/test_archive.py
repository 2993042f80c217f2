"""Archives whose author is not trusted, made with Python's tarfile and with the system's tar."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lorahost.adapters.archive import MAX_READ, is_archive, unpack
from lorahost.adapters.source_files import SourceLimits
from lorahost.errors import AdapterRejectedError

SRC = "s3://bucket/a.tar.gz"
LIMITS = SourceLimits(max_bytes=1 << 20, max_files=20)
WEIGHTS = bytes(range(256)) * 100


def member(name: str, data: bytes = b"{}", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, io.BytesIO(data)


def write(path: Path, *members: tuple, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for info, data in members:
            tar.addfile(info, data)
    return path


def refused(archive: Path, into: Path, limits: SourceLimits = LIMITS) -> AdapterRejectedError:
    with pytest.raises(AdapterRejectedError) as caught:
        unpack(archive, into, limits, SRC)
    assert caught.value.status == 424
    assert SRC in caught.value.message
    return caught.value


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(
        tmp_path / "good.tar.gz",
        member("./adapter_config.json"),
        member("./adapter_model.safetensors", WEIGHTS),
        member("./model.py", b"print(1)"),
        member("./._adapter_model.safetensors", b"resource fork"),
        member("./deep/deeper/adapter_config.json"),
    )


def test_only_the_files_that_matter(good: Path, tmp_path: Path) -> None:
    unpacked = unpack(good, tmp_path / "out", LIMITS, SRC)
    assert unpacked.files == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(unpacked.skipped) == ["._adapter_model.safetensors", "adapter_config.json", "model.py"]
    assert unpacked.bytes == len(WEIGHTS) + 2
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*"))
    assert written == ["adapter_config.json", "adapter_model.safetensors"]
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("options", [["-czf"], ["-cf"], ["--format=pax", "-czf"], ["--format=gnu", "-czf"]])
def test_what_the_tar_command_writes(options: list[str], tmp_path: Path) -> None:
    long = "d" * 120
    source = tmp_path / "source" / long
    source.mkdir(parents=True)
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(WEIGHTS)
    archive = tmp_path / "a.tar.gz"
    subprocess.run(["tar", *options, archive, "-C", tmp_path / "source", "."], check=True)
    unpacked = unpack(archive, tmp_path / "out", LIMITS, SRC)
    assert sorted(unpacked.files) == [f"{long}/adapter_config.json", f"{long}/adapter_model.safetensors"]
    assert (tmp_path / "out" / long / "adapter_model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "bad",
    [
        member("/etc/adapter_config.json"),
        member("../adapter_config.json"),
        member("a/../../adapter_config.json"),
        member("a\\..\\adapter_config.json"),
        member("ignored/../../model.py"),
        member("adapter_config.json", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("adapter_config.json", kind=tarfile.LNKTYPE, link="model.py"),
        member("anything", kind=tarfile.SYMTYPE, link="."),
        member("adapter_config.json", kind=tarfile.CHRTYPE),
        member("adapter_config.json", kind=tarfile.FIFOTYPE),
        member("adapter_config.json", kind=tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda pair: f"{pair[0].name}-{pair[0].type!r}",
)
def test_unsafe_members(bad: tuple, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", bad)
    error = refused(archive, tmp_path / "out")
    assert error.code == "unsafe_archive"
    assert not any(p.is_file() or p.is_symlink() for p in (tmp_path / "out").rglob("*"))


def test_a_member_may_not_appear_twice(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("adapter_config.json"), member("./adapter_config.json"))
    assert "twice" in refused(archive, tmp_path / "out").message


def test_size_limit_counts_skipped_members_too(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("notes.txt", bytes(LIMITS.max_bytes + 1)))
    assert archive.stat().st_size < 10_000
    error = refused(archive, tmp_path / "out")
    assert error.code == "artifact_too_large"
    assert str(LIMITS.max_bytes) in error.message


def test_size_limit_is_met_before_the_bytes_are_written(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("a.safetensors", bytes(LIMITS.max_bytes + 1)))
    refused(archive, tmp_path / "out")
    assert sum(p.stat().st_size for p in (tmp_path / "out").rglob("*")) == 0


def test_a_bomb_behind_the_end_of_the_archive(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("adapter_config.json"))
    with archive.open("ab") as file, gzip.GzipFile(fileobj=file, mode="wb") as bomb:
        for _ in range(80):
            bomb.write(bytes(1 << 20))
    assert refused(archive, tmp_path / "out").code == "artifact_too_large"


def test_number_of_members(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", *[member(f"skipped-{i}") for i in range(LIMITS.max_files + 1)])
    error = refused(archive, tmp_path / "out")
    assert error.code == "artifact_too_large"
    assert "20 files" in error.message


def test_a_header_that_asks_for_much_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, MAX_READ + 1
    archive = tmp_path / "a.tar"
    archive.write_bytes(info.tobuf() + bytes(2 * MAX_READ))
    error = refused(archive, tmp_path / "out")
    assert error.code == "bad_archive"
    assert f"asks for {MAX_READ + 512} bytes" in error.message


def test_a_header_that_points_backwards(tmp_path: Path) -> None:
    first, second = tarfile.TarInfo("skipped"), bytearray(tarfile.TarInfo("skipped too").tobuf())
    second[124:136] = (-512).to_bytes(12, "big", signed=True)
    second[148:156] = b" " * 8
    second[148:156] = b"%06o\0 " % sum(second)
    archive = tmp_path / "a.tar"
    archive.write_bytes(first.tobuf() + bytes(second) + bytes(1024))
    error = refused(archive, tmp_path / "out")
    assert error.code == "bad_archive"
    assert "points backwards" in error.message


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def no_checksum(data: bytes) -> bytes:
    return data[:-8]


def flipped(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 0xFF]) + data[-39:]


@pytest.mark.parametrize("damage", [cut, no_checksum, flipped, lambda data: b"", lambda data: b"no archive" * 99])
def test_damaged_gzip(damage: Callable[[bytes], bytes], good: Path, tmp_path: Path) -> None:
    good.write_bytes(damage(good.read_bytes()))
    assert refused(good, tmp_path / "out").code == "bad_archive"


@pytest.mark.parametrize("keep", [700, 1024, 1100, 1536])
def test_a_plain_tar_that_ends_early(keep: int, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", member("adapter_config.json"), member("a.safetensors"), mode="w")
    archive.write_bytes(archive.read_bytes()[:keep])
    assert refused(archive, tmp_path / "out").code == "bad_archive"


def test_a_damaged_header_in_the_middle(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", member("adapter_config.json"), member("a.safetensors"), mode="w")
    data = bytearray(archive.read_bytes())
    data[1024 + 150] ^= 0x7F
    archive.write_bytes(data)
    assert refused(archive, tmp_path / "out").code == "bad_archive"


def test_what_counts_as_an_archive() -> None:
    assert [n for n in ("a.tar.gz", "a.TGZ", "a.tar", "a.zip", "tar", "a.gz") if is_archive(n)] == [
        "a.tar.gz",
        "a.TGZ",
        "a.tar",
    ]
