"""What exists in the local account."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorahost_deploy.local.containers import Container, Launcher
from lorahost_deploy.local.failures import ApiError, invalid

ACCOUNT = "123456789012"
CALLER = f"arn:aws:iam::{ACCOUNT}:user/local"
Json = dict[str, Any]
PAGE = 10


def page(key: str, items: list[Json], request: Json) -> Json:
    """One page of a listing; the token is the position."""
    begin = int(request.get("NextToken", "0"))
    end = begin + int(request.get("MaxResults", PAGE))
    return {key: items[begin:end], **({"NextToken": str(end)} if end < len(items) else {})}


@dataclass
class Endpoint:
    """One endpoint and where it is on its way."""

    name: str
    config: str
    status: str = "Creating"
    reason: str = ""
    created: float = field(default_factory=time.time)
    modified: float = field(default_factory=time.time)


@dataclass
class Component:
    """One inference component: a base model with its containers, or an adapter on a base.

    Attributes:
        base: Name of the base component; empty for a base.
        identifier: What the containers call the adapter.
        directory: Where each container's copy of the adapter is unpacked, by container.
    """

    name: str
    endpoint: str
    specification: Json
    variant: str = "AllTraffic"
    base: str = ""
    copies: int = 0
    status: str = "Creating"
    reason: str = ""
    created: float = field(default_factory=time.time)
    modified: float = field(default_factory=time.time)
    identifier: str = ""
    containers: list[Container] = field(default_factory=list)
    directories: dict[str, Path] = field(default_factory=dict)


@dataclass
class Conduct:
    """How the local account behaves.

    Attributes:
        settle_s: Seconds that each change takes at least.
        deny: IAM actions that are refused.
        quotas: Most instances of a type.
        failing: Reasons why endpoints and components of these names fail.
    """

    settle_s: float = 0.5
    deny: set[str] = field(default_factory=set)
    quotas: dict[str, int] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)


class World:
    """The account: models, configurations, endpoints, components.

    Args:
        launcher: Starts containers.
        work_dir: For downloaded models.
        aws: Clients for the services that moto plays, by name.
    """

    def __init__(
        self, launcher: Launcher, work_dir: Path, region: str, conduct: Conduct, aws: Callable[[str], Any]
    ) -> None:
        self.launcher = launcher
        self.work_dir = work_dir
        self.region = region
        self.conduct = conduct
        self.aws = aws
        self.lock = threading.RLock()
        self.models: dict[str, Json] = {}
        self.configs: dict[str, Json] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.components: dict[str, Component] = {}
        self.targets: dict[str, Json] = {}
        self.policies: dict[tuple[str, str], Json] = {}

    def arn(self, kind: str, name: str) -> str:
        """The ARN of something of SageMaker's."""
        return f"arn:aws:sagemaker:{self.region}:{ACCOUNT}:{kind}/{name.lower()}"

    def background(self, work: Callable[[], None]) -> None:
        """Goes on with a change after its request was answered."""

        def later() -> None:
            time.sleep(self.conduct.settle_s)
            work()

        threading.Thread(target=later, daemon=True).start()

    def component(self, name: str) -> Component:
        """An existing component; ApiError otherwise."""
        if name not in self.components:
            raise invalid(f'Could not find inference component "{self.arn("inference-component", name)}".')
        return self.components[name]

    def adapters_of(self, base: str) -> list[Component]:
        """The adapters on a base component."""
        return [c for c in self.components.values() if c.base == base]

    def check_quota(self, config: Mapping[str, Any]) -> None:
        """Raises ApiError when an endpoint of this configuration is more than the account may have."""
        variant = config["ProductionVariants"][0]
        kind, asked = variant["InstanceType"], variant["InitialInstanceCount"]
        most = self.conduct.quotas.get(kind)
        if most is None:
            return
        used = 0
        for endpoint in self.endpoints.values():
            other = self.configs[endpoint.config]["ProductionVariants"][0]
            used += other["InitialInstanceCount"] if other["InstanceType"] == kind else 0
        if used + asked > most:
            raise ApiError(
                "ResourceLimitExceeded",
                f"The account-level service limit '{kind} for endpoint usage' is {most} Instances, with current "
                f"utilization of {used} Instances and a request delta of {asked} Instances. Please use AWS Service "
                "Quotas to request an increase for this quota.",
            )
