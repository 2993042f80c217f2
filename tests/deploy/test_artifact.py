"""The archive of an adapter, and its history."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from lorahost.adapters import chat_template
from lorahost.adapters.archive import unpack
from lorahost.adapters.source import digest_of
from lorahost.adapters.source_files import SourceLimits
from lorahost_deploy import artifact, history, plan
from lorahost_deploy.plan import S3Place

from .conftest import DEMO, MODEL

PIRATE = DEMO / "adapters" / "pirate"
PLACE = S3Place(bucket="b", prefix="p")


def packed(source: Path, into: Path) -> bytes:
    artifact.pack(artifact.check("pirate", source, MODEL, 32), into)
    return into.read_bytes()


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    other = tmp_path / "nested" / "inner"
    shutil.copytree(PIRATE, other)
    for path in other.iterdir():
        os.utime(path, (1, 1))
        path.chmod(0o600)
    (other / "optimizer.pt").write_bytes(b"not for serving")
    (other / "README.md").write_text("neither is this")
    assert packed(PIRATE, tmp_path / "a.tar.gz") == packed(other.parent, tmp_path / "elsewhere.tar.gz")


def test_the_key_names_the_version_that_the_server_reports(tmp_path: Path) -> None:
    found = artifact.check("pirate", PIRATE, MODEL, 32)
    assert found.url(PLACE) == f"s3://b/p/adapters/pirate/{digest_of(PIRATE)}.tar.gz"
    own = tmp_path / "own"
    shutil.copytree(PIRATE, own)
    (own / chat_template.FILE).write_text("{{ messages[0].content }}")
    assert artifact.check("pirate", own, MODEL, 32).digest != found.digest


def test_the_server_unpacks_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(PIRATE, own)
    (own / chat_template.FILE).write_text("{{ messages[0].content }}")
    packed(own, tmp_path / "a.tar.gz")
    unpack(tmp_path / "a.tar.gz", tmp_path / "out", SourceLimits(), "a.tar.gz")
    assert digest_of(tmp_path / "out") == digest_of(own)
    assert (tmp_path / "out" / chat_template.FILE).read_text() == "{{ messages[0].content }}"
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == ["adapter_config.json", "adapter_model.safetensors", chat_template.FILE]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members} == {(0, 0, 0, "", 0o644)}


@pytest.mark.parametrize(
    ("versions", "live", "expected"),
    [
        (["a", "b", "c"], "c", "b"),
        (["a", "b", "c"], "b", "a"),
        (["a", "b"], "a", None),
        (["a", "b"], "never worked", "b"),
        ([], "a", None),
    ],
)
def test_the_version_before(versions: list[str], live: str, expected: str | None) -> None:
    assert history.before(versions, live) == expected


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 32), ({"SM_VLLM_MAX_LORA_RANK": "64"}, 64), ({"OPTION_MAX_LORA_RANK": "16"}, 16), ({"X": "1"}, 32)],
)
def test_the_servers_rank(environment: dict[str, str], rank: int) -> None:
    assert artifact.max_rank(environment) == rank


def test_the_example_is_a_plan(tmp_path: Path) -> None:
    example = DEMO.parents[1] / "deploy" / "examples" / "endpoint.yaml"
    wanted = plan.load(example)
    wanted.need("image", "model", "store", "instance_type")
    assert wanted.adapters["sql"] == example.parent / "adapters" / "sql"
    # a local model is relative to its file, and an option overrules the file
    (tmp_path / "e.yaml").write_text("endpoint: e\nmodel: weights\nenvironment: {A: '1', B: '2'}\n")
    found = plan.load(tmp_path / "e.yaml", endpoint="other", environment={"B": "3"})
    assert (found.endpoint, found.model) == ("other", str(tmp_path / "weights"))
    assert found.environment == {"A": "1", "B": "3"}
