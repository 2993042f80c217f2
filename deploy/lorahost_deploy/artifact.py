"""An adapter's archive: checked by the server's own importer, always the same bytes for the same files."""

from __future__ import annotations

import gzip
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorahost import client
from lorahost.adapters import chat_template
from lorahost.adapters.source import find_files
from lorahost.errors import HostError
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.plan import S3Place

# weights hardly get smaller, and level 1 is several times faster
GZIP_LEVEL = 1


@dataclass(frozen=True)
class Artifact:
    """An adapter that the server takes.

    Attributes:
        digest: The version's sha256, as the server computes it.
        warnings: What the importer found remarkable.
    """

    name: str
    digest: str
    files: tuple[Path, ...]
    rank: int
    warnings: tuple[str, ...]

    def key(self, place: S3Place) -> str:
        """Its key in the store; another version has another key, so SageMaker sees the change."""
        return place.key("adapters", self.name, f"{self.digest}.tar.gz")

    def url(self, place: S3Place) -> str:
        """Its address in the store."""
        return f"s3://{place.bucket}/{self.key(place)}"


def check(name: str, path: Path, model: Path, max_rank: int) -> Artifact:
    """Runs the server's importer on the adapter in `path`.

    Args:
        model: The base model's directory or config.json.

    Raises:
        DeployError: the server would refuse it, for this reason.
    """
    try:
        report = client.check(str(path), str(model), max_rank)
        found = find_files(path)
    except HostError as error:
        raise DeployError(f"adapter {name} ({path}): {error.message} [{error.code}]") from error
    folder = found.config.parent
    templates = [folder / n for n in (chat_template.FILE, chat_template.TOKENIZER_CONFIG) if (folder / n).is_file()]
    files = (found.config, *found.weights, *templates)
    return Artifact(name, report["digest"], files, report["rank"], tuple(report["warnings"]))


def pack(artifact: Artifact, into: Path) -> None:
    """Writes the tar.gz, files at its root: sorted, without times, owners or the archive's own name."""
    with (
        into.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(artifact.files, key=lambda p: p.name):
            member = tarfile.TarInfo(path.name)
            member.size, member.mode, member.mtime = path.stat().st_size, 0o644, 0
            with path.open("rb") as file:
                tar.addfile(member, file)


def upload(aws: Aws, artifact: Artifact, place: S3Place) -> str:
    """Puts the archive into the store unless it is there; returns its address."""
    key = artifact.key(place)
    if aws.find("s3", "HeadObject", Bucket=place.bucket, Key=key) is None:
        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / f"{artifact.name}.tar.gz"
            pack(artifact, packed)
            aws.upload(packed, place.bucket, key, f"adapter {artifact.name}@{artifact.digest[:12]}")
    return artifact.url(place)


@contextmanager
def base_config(aws: Aws, base: str, model: str) -> Iterator[tuple[Path, int]]:
    """The base model's directory or config.json, and the largest rank that its server takes.

    Args:
        model: A local model; empty: what the deployed base component runs.

    Raises:
        DeployError: the deployed model's configuration can't be had.
    """
    component = aws.find("sagemaker", "DescribeInferenceComponent", InferenceComponentName=base)
    container: dict[str, dict[str, str]] = {}
    source = ""
    if component is not None and component["Specification"].get("ModelName"):
        described = aws.read("sagemaker", "DescribeModel", ModelName=component["Specification"]["ModelName"])
        container = described["PrimaryContainer"]
        source = described["PrimaryContainer"].get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri", "")
    rank = max_rank(container.get("Environment", {}))
    if model and not model.startswith("s3://"):
        yield Path(model), rank
        return
    source = model or source
    if not source:
        raise DeployError(f"base {base} has no model in S3: give its directory or config.json with --model")
    place = S3Place.parse(source)
    answer = aws.find("s3", "GetObject", Bucket=place.bucket, Key=place.key("config.json"))
    if answer is None:
        raise DeployError(f"no config.json at {place.url()}: give the model's directory with --model")
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_bytes(answer["Body"].read())
        yield config, rank


def max_rank(environment: dict[str, str]) -> int:
    """The largest rank that a server with this environment takes."""
    for name in ("SM_VLLM_MAX_LORA_RANK", "OPTION_MAX_LORA_RANK", "LORAHOST_MAX_LORA_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 32
