"""Adapters from S3, with moto as the other side."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws
from moto.server import ThreadedMotoServer

from lorahost.adapters import s3
from lorahost.adapters.fetch import SourceFetcher
from lorahost.adapters.source_files import SourceLimits
from lorahost.errors import AdapterRejectedError

BUCKET = "adapters"
WEIGHTS = bytes(range(256)) * 80_000


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def client() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client


def put_adapter(client: Any, prefix: str, weights: bytes = WEIGHTS) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{prefix}adapter_config.json", Body=b"{}")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}adapter_model.safetensors", Body=weights)


def packed(weights: bytes = WEIGHTS) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, data in (("./adapter_config.json", b"{}"), ("./adapter_model.safetensors", weights)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def rejected(src: str, into: Path, fetcher: SourceFetcher | None = None) -> AdapterRejectedError:
    with pytest.raises(AdapterRejectedError) as caught:
        (fetcher or SourceFetcher()).fetch(src, into)
    assert caught.value.status == 424
    return caught.value


@pytest.mark.parametrize("src", [f"s3://{BUCKET}/team/a/", f"s3://{BUCKET}/team/a"])
@pytest.mark.parametrize("nested", ["", "checkpoint/"])
def test_a_prefix(src: str, nested: str, client: Any, tmp_path: Path) -> None:
    put_adapter(client, f"team/a/{nested}")
    put_adapter(client, "team/another/")
    client.put_object(Bucket=BUCKET, Key="team/a/", Body=b"")
    client.put_object(Bucket=BUCKET, Key="team/a/model.py", Body=b"print(1)")
    client.put_object(Bucket=BUCKET, Key="team/a/x/../../adapter_config.json", Body=b"escaped")
    found = SourceFetcher().fetch(src, tmp_path)
    assert found == tmp_path / "objects" / nested
    assert (found / "adapter_model.safetensors").read_bytes() == WEIGHTS
    files = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]


def test_an_archive_is_unpacked_and_removed(client: Any, tmp_path: Path) -> None:
    client.put_object(Bucket=BUCKET, Key="a.tar.gz", Body=packed())
    found = SourceFetcher().fetch(f"s3://{BUCKET}/a.tar.gz", tmp_path)
    assert (found / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert list(tmp_path.rglob("*.tar.gz")) == []


def test_several_parts(client: Any, tmp_path: Path) -> None:
    put_adapter(client, "a/")
    fetcher = SourceFetcher(s3=s3.S3Settings(part_bytes=5 << 20, threads=3))
    found = fetcher.fetch(f"s3://{BUCKET}/a/", tmp_path)
    assert (found / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_an_object_that_was_uploaded_in_parts(client: Any, tmp_path: Path) -> None:
    put_adapter(client, "a/")
    config = boto3.s3.transfer.TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    client.upload_fileobj(io.BytesIO(WEIGHTS), BUCKET, "a/adapter_model.safetensors", Config=config)
    assert "-" in client.head_object(Bucket=BUCKET, Key="a/adapter_model.safetensors")["ETag"]
    found = SourceFetcher().fetch(f"s3://{BUCKET}/a/", tmp_path)
    assert (found / "adapter_model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("src", "named"),
    [
        (f"s3://{BUCKET}/absent.tar.gz", "'absent.tar.gz' in bucket 'adapters'"),
        (f"s3://{BUCKET}/absent/", "'absent/' in bucket 'adapters'"),
        ("s3://no-such-bucket/a/", "'a/' in bucket 'no-such-bucket'"),
        ("s3://no-such-bucket/a.tar.gz", "'a.tar.gz' in bucket 'no-such-bucket'"),
    ],
)
def test_missing(src: str, named: str, client: Any, tmp_path: Path) -> None:
    error = rejected(src, tmp_path)
    assert error.code == "artifact_missing"
    assert named in error.message


@pytest.mark.parametrize("key", ["a.tar.gz", "a/"])
def test_too_large_before_the_download(key: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put_object(Bucket=BUCKET, Key="a.tar.gz", Body=bytes(2000))
    put_adapter(client, "a/", bytes(2000))
    monkeypatch.setattr(s3.S3Store, "_get", lambda *args: pytest.fail("downloaded all the same"))
    error = rejected(f"s3://{BUCKET}/{key}", tmp_path, SourceFetcher(limits=SourceLimits(max_bytes=1999)))
    assert error.code == "artifact_too_large"
    assert "1999" in error.message


def test_an_object_that_changes_meanwhile(client: Any, tmp_path: Path) -> None:
    put_adapter(client, "a/")
    store = s3.S3Store(s3.S3Settings())
    found = store._head(BUCKET, "a/adapter_model.safetensors")
    client.put_object(Bucket=BUCKET, Key=found.key, Body=WEIGHTS[::-1])
    with pytest.raises(AdapterRejectedError) as caught:
        store._get(found, tmp_path / "w")
    assert caught.value.code == "source_changed"
    assert not (tmp_path / "w").exists()


def test_damaged_on_the_way(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_adapter(client, "a/")
    store = s3.S3Store(s3.S3Settings())

    def download(bucket: str, key: str, path: str, **options: Any) -> None:
        Path(path).write_bytes(WEIGHTS[:-1] + b"!")

    monkeypatch.setattr(store._client, "download_file", download)
    found = store._head(BUCKET, "a/adapter_model.safetensors")
    with pytest.raises(AdapterRejectedError) as caught:
        store._get(found, tmp_path / "w")
    assert caught.value.code == "artifact_corrupt"
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("error_code", "status", "code"),
    [
        ("AccessDenied", 403, "artifact_access_denied"),
        ("403", 403, "artifact_access_denied"),
        ("ExpiredToken", 400, "artifact_access_denied"),
        ("NoSuchBucket", 404, "artifact_missing"),
        ("SlowDown", 503, "artifact_unavailable"),
        ("InternalError", 500, "artifact_unavailable"),
    ],
)
def test_error_codes(error_code: str, status: int, code: str) -> None:
    store = s3.S3Store(s3.S3Settings(attempts=1))
    with Stubber(store._client) as stub:
        stub.add_client_error("head_object", error_code, "no", status)
        with pytest.raises(AdapterRejectedError) as caught:
            store._head(BUCKET, "a.tar.gz")
    assert caught.value.code == code
    assert f"'a.tar.gz' in bucket '{BUCKET}'" in caught.value.message


def test_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    error = rejected(f"s3://{BUCKET}/a.tar.gz", tmp_path / "into")
    assert error.code == "artifact_access_denied"
    assert "credentials" in error.message


def test_nobody_listens(tmp_path: Path) -> None:
    settings = s3.S3Settings(endpoint_url="http://127.0.0.1:9", attempts=1, connect_timeout_s=1)
    error = rejected(f"s3://{BUCKET}/a.tar.gz", tmp_path, SourceFetcher(s3=settings))
    assert error.code == "artifact_unavailable"
    assert BUCKET in error.message


@pytest.mark.parametrize("how", ["setting", "environment"])
def test_another_endpoint(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket=BUCKET)
        put_adapter(client, "a/", b"weights")
        settings = s3.S3Settings(endpoint_url=url) if how == "setting" else s3.S3Settings()
        if how == "environment":
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        found = SourceFetcher(s3=settings).fetch(f"s3://{BUCKET}/a/", tmp_path)
        assert (found / "adapter_model.safetensors").read_bytes() == b"weights"
    finally:
        server.stop()


def test_without_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    error = rejected(f"s3://{BUCKET}/a/", tmp_path)
    assert error.code == "s3_unavailable"
    assert "pip install boto3" in error.message
