"""container/compose.yaml and what it mounts: whole, pinned, and pointing at each other."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
DEFAULT = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")
Pinned = Annotated[str, StringConstraints(pattern=r"^[a-z0-9./-]+:v?\d+\.\d+\.\d+$")]
# a port of this machine alone, its number possibly from a variable
Port = Annotated[str, StringConstraints(pattern=r"^127\.0\.0\.1:(\d+|\$\{[A-Z]+:-\d+\}):\d+$")]
Mount = Annotated[str, StringConstraints(pattern=r"^[^:]+(:-[^:]+)?:/[^:]+(:ro)?$")]


class Strict(BaseModel):
    """Knows all its fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Build(Strict):
    context: str
    target: str


class Device(Strict):
    driver: str
    count: int
    capabilities: list[str]


class Reservations(Strict):
    devices: list[Device]


class Resources(Strict):
    reservations: Reservations


class Deploy(Strict):
    resources: Resources


class Network(Strict):
    aliases: list[str]


class Service(Strict):
    build: Build | None = None
    image: Pinned | None = None
    profiles: list[str] = []
    ports: list[Port]
    environment: dict[str, str] = {}
    volumes: list[Mount]
    depends_on: list[str] = []
    networks: dict[str, Network] = {}
    deploy: Deploy | None = None
    read_only: bool = False
    tmpfs: list[str] = []
    shm_size: str = ""
    stop_grace_period: str = ""


class Compose(Strict):
    name: str
    services: dict[str, Service]
    volumes: dict[str, None]
    server: dict[str, Any] = Field(alias="x-server")


def read() -> dict[str, Any]:
    """The file, YAML's anchors followed."""
    found: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    return found


def mounts(service: Service) -> dict[str, str]:
    """Sources by their place in the container, defaults put in."""
    pairs = (DEFAULT.sub(r"\1", mount).split(":") for mount in service.volumes)
    return {pair[1]: pair[0] for pair in pairs}


def check(document: dict[str, Any]) -> Compose:
    """The file as Compose would take it; ValidationError or AssertionError names what is wrong."""
    compose = Compose.model_validate(document)
    for name, service in compose.services.items():
        assert (service.build is None) != (service.image is None), f"{name}: build or image"
        assert set(service.depends_on) <= set(compose.services), f"{name}: depends_on"
        for place, source in mounts(service).items():
            is_path = source.startswith((".", "/"))
            assert (CONTAINER / source).exists() if is_path else source in compose.volumes, f"{name}: {source}:{place}"
        if service.build is not None:
            dockerfile = (CONTAINER / service.build.context / "Dockerfile").read_text()
            assert re.search(rf"^FROM .* AS {service.build.target}$", dockerfile, re.M), f"{name}: build target"
    return compose


def test_it_is_a_compose_file_whose_files_and_targets_are_there() -> None:
    compose = check(read())
    assert list(compose.services) == ["lorahost", "lorahost-gpu", "prometheus", "grafana"]
    assert [name for name, service in compose.services.items() if service.profiles] == ["lorahost-gpu"]
    for name in ("lorahost", "lorahost-gpu"):
        assert compose.services[name].read_only
        assert {"/opt/ml/model", "/adapters"} == set(mounts(compose.services[name]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda services: services["grafana"].update(portz=["1:1"]),
        lambda services: services["grafana"].update(image="grafana/grafana:latest"),
        lambda services: services["grafana"].update(depends_on=["loki"]),
        lambda services: services["grafana"]["volumes"].append("./grafana/other.json:/other.json:ro"),
        lambda services: services["prometheus"]["volumes"].append("tsdb:/tsdb"),
        lambda services: services["prometheus"].update(ports=["9090:9090"]),
        lambda services: services["lorahost"]["build"].update(target="tpu"),
        lambda services: services["lorahost"].pop("build"),
    ],
)
def test_what_is_wrong_is_found(spoil: Callable[[dict[str, Any]], object]) -> None:
    document = copy.deepcopy(read())
    spoil(document["services"])
    with pytest.raises((ValidationError, AssertionError)):
        check(document)


def test_prometheus_grafana_and_the_server_find_each_other() -> None:
    services = check(read()).services
    config = yaml.safe_load((CONTAINER / mounts(services["prometheus"])["/etc/prometheus/prometheus.yml"]).read_text())
    [job] = config["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert {name for name in services if name == host or host in _aliases(services[name])} == {
        "lorahost",
        "lorahost-gpu",
    }
    assert services[host].ports[0].rpartition(":")[2] == port
    provisioning = CONTAINER / mounts(services["grafana"])["/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus'].ports[0].rpartition(':')[2]}"
    [provider] = yaml.safe_load((provisioning / "dashboards/lorahost.yaml").read_text())["providers"]
    home = services["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounts(services["grafana"])
    assert str(Path(home).parent) == provider["options"]["path"]
    assert json.loads((CONTAINER / mounts(services["grafana"])[home]).read_text())["uid"] == "lorahost"


def _aliases(service: Service) -> list[str]:
    return [alias for network in service.networks.values() for alias in network.aliases]
