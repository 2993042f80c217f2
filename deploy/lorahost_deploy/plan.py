"""What an endpoint shall look like: one YAML file, or the same as options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from lorahost_deploy.errors import DeployError

VARIANT = "AllTraffic"
NAME_PATTERN = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
# SageMaker's GPU images by the newest CUDA that their driver runs
AMI_OF_CUDA = {
    "12.2": "al2-ami-sagemaker-inference-gpu-2",
    "12.4": "al2-ami-sagemaker-inference-gpu-3-1",
    "13.0": "al2023-ami-sagemaker-inference-gpu-4-1",
}
# the model's and the configuration's names get 9 more characters; SageMaker takes 63
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$", max_length=54)]
AdapterName = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$", max_length=63)]


class S3Place(BaseModel, frozen=True):
    """A bucket and a prefix without slashes at its ends."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> S3Place:
        """Reads `s3://bucket/prefix`.

        Raises:
            DeployError: it is none.
        """
        found = re.fullmatch(r"s3://([^/]+)/?(.*)", url)
        if not found:
            raise DeployError(f"{url!r} is no S3 address; expected s3://bucket or s3://bucket/prefix")
        return cls(bucket=found[1], prefix=found[2].strip("/"))

    def key(self, *parts: str) -> str:
        """The key of something below the prefix."""
        return "/".join(part for part in (self.prefix, *parts) if part)

    def url(self, *parts: str) -> str:
        """The same as an address."""
        return f"s3://{self.bucket}/{self.key(*parts)}"


class Plan(BaseModel):
    """The whole desired state; each verb uses its part of it.

    Attributes:
        endpoint: Its name; model, configuration and base component are named after it.
        image: The container image in ECR.
        model: The base model: a local directory, which is uploaded, or `s3://bucket/prefix/`.
        store: Where uploads go, `s3://bucket/prefix`.
        role: Execution role, name or ARN.
        cuda: The image's CUDA; picks the instance's driver unless `ami` is set.
        memory_mb: Memory that one copy needs at least.
        adapters: Inference component names with their local directories, relative to the file.
    """

    model_config = ConfigDict(extra="forbid")

    endpoint: Name
    image: str = ""
    model: str = ""
    store: str = ""
    role: str = "lorahost-execution"
    instance_type: str = ""
    min_instances: int = Field(1, ge=0)
    max_instances: int = Field(1, ge=1)
    accelerators: int = Field(1, ge=1)
    memory_mb: int = Field(16384, ge=128)
    cpus: float | None = Field(None, ge=0.25)
    copies: int = Field(1, ge=0)
    environment: dict[str, str] = Field(default_factory=dict)
    cuda: Literal["12.2", "12.4", "13.0"] = "13.0"
    ami: str = ""
    routing: str = "LEAST_OUTSTANDING_REQUESTS"
    download_timeout_s: int = Field(3600, ge=60, le=3600)
    startup_timeout_s: int = Field(1800, ge=60, le=3600)
    volume_gb: int | None = None
    network_isolation: bool = True
    subnets: list[str] = Field(default_factory=list)
    security_groups: list[str] = Field(default_factory=list)
    adapters: dict[AdapterName, Path] = Field(default_factory=dict)

    @property
    def base(self) -> str:
        """Name of the base inference component."""
        return base_of(self.endpoint)

    @property
    def ami_version(self) -> str:
        """The instance image."""
        return self.ami or AMI_OF_CUDA[self.cuda]

    def need(self, *names: str) -> None:
        """Raises DeployError when one of these fields is empty."""
        if missing := [name for name in names if not getattr(self, name)]:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise DeployError(f"missing: {options} (or {', '.join(missing)} in the file given with -f)")


def base_of(endpoint: str) -> str:
    """Name of an endpoint's base inference component."""
    return f"{endpoint}-base"


def load(file: Path | None, **options: Any) -> Plan:
    """Reads the desired state; options that are not None or empty overrule the file.

    Raises:
        DeployError: an unknown or bad field; the message names it.
    """
    values = read_yaml(file) if file else {}
    folder = file.parent if file else Path()
    # only a mapping has entries to make absolute; anything else is refused below with the field's name
    if isinstance(values.get("adapters"), dict):
        values["adapters"] = {name: folder / str(path) for name, path in values["adapters"].items()}
    model = values.get("model")
    if isinstance(model, str) and model and not model.startswith("s3://"):
        values["model"] = str(folder / model)
    given = {name: value for name, value in options.items() if value not in (None, "", (), {})}
    environment = {**(values.get("environment") or {}), **given.pop("environment", {})}
    merged = {**values, **given, **({"environment": environment} if environment else {})}
    try:
        return Plan.model_validate(merged)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise DeployError(f"{file or 'options'}: {said}") from error


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML file that holds an object.

    Raises:
        DeployError: it holds something else.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise DeployError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise DeployError(f"{file}: expected an object of fields, found {type(found).__name__}")
    return found
