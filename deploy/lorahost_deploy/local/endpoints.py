"""SageMaker's models, endpoint configurations and endpoints."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import urlsplit

from lorahost_deploy.local.failures import invalid
from lorahost_deploy.local.state import Endpoint, Json, World, page

KINDS = {"Model": "model", "EndpointConfig": "endpoint-config"}


class Endpoints:
    """One method for each operation, named like it in snake case; takes and returns the operation's JSON."""

    def __init__(self, world: World) -> None:
        self._world = world

    def create_model(self, request: Json) -> Json:
        name = request["ModelName"]
        self._new("Model", self._world.models, name)
        source = request.get("PrimaryContainer", {}).get("ModelDataSource", {}).get("S3DataSource", {})
        if source:
            self._check_data(source["S3Uri"])
        self._world.models[name] = {**request, "CreationTime": time.time()}
        return {"ModelArn": self._world.arn("model", name)}

    def describe_model(self, request: Json) -> Json:
        name = request["ModelName"]
        found = self._existing("Model", self._world.models, name)
        return {**_without_tags(found), "ModelArn": self._world.arn("model", name)}

    def list_models(self, request: Json) -> Json:
        return page("Models", self._listed("Model", self._world.models, request), request)

    def delete_model(self, request: Json) -> Json:
        self._existing("Model", self._world.models, request["ModelName"])
        del self._world.models[request["ModelName"]]
        return {}

    def create_endpoint_config(self, request: Json) -> Json:
        name = request["EndpointConfigName"]
        self._new("EndpointConfig", self._world.configs, name)
        for variant in request["ProductionVariants"]:
            if "ModelName" in variant:
                raise invalid(
                    "lorahost local-aws plays endpoints of inference components: no ModelName on the variant."
                )
            if "ExecutionRoleArn" not in request:
                raise invalid("ExecutionRoleArn is required when a production variant has no ModelName.")
            scaling = variant.get("ManagedInstanceScaling", {})
            if scaling.get("MinInstanceCount", 0) > scaling.get("MaxInstanceCount", 1 << 30):
                raise invalid("MinInstanceCount must not be greater than MaxInstanceCount.")
            if "InitialInstanceCount" not in variant or "InstanceType" not in variant:
                raise invalid("InitialInstanceCount and InstanceType are required for an instance-based variant.")
        self._world.configs[name] = {**request, "CreationTime": time.time()}
        return {"EndpointConfigArn": self._world.arn("endpoint-config", name)}

    def describe_endpoint_config(self, request: Json) -> Json:
        name = request["EndpointConfigName"]
        found = self._existing("EndpointConfig", self._world.configs, name)
        return {**_without_tags(found), "EndpointConfigArn": self._world.arn("endpoint-config", name)}

    def list_endpoint_configs(self, request: Json) -> Json:
        return page("EndpointConfigs", self._listed("EndpointConfig", self._world.configs, request), request)

    def delete_endpoint_config(self, request: Json) -> Json:
        self._existing("EndpointConfig", self._world.configs, request["EndpointConfigName"])
        del self._world.configs[request["EndpointConfigName"]]
        return {}

    def create_endpoint(self, request: Json) -> Json:
        world, name = self._world, request["EndpointName"]
        arn = world.arn("endpoint", name)
        if name in world.endpoints:
            raise invalid(f'Cannot create already existing endpoint "{arn}".')
        config = self._existing("EndpointConfig", world.configs, request["EndpointConfigName"])
        world.check_quota(config)
        endpoint = world.endpoints[name] = Endpoint(name, request["EndpointConfigName"])
        world.background(lambda: self._arrive(endpoint))
        return {"EndpointArn": arn}

    def update_endpoint(self, request: Json) -> Json:
        world, name = self._world, request["EndpointName"]
        endpoint = self._endpoint(name)
        self._existing("EndpointConfig", world.configs, request["EndpointConfigName"])
        if endpoint.status != "InService":
            raise invalid(f'Cannot update in-progress endpoint "{world.arn("endpoint", name)}".')
        endpoint.config, endpoint.status = request["EndpointConfigName"], "Updating"
        world.background(lambda: self._arrive(endpoint))
        return {"EndpointArn": world.arn("endpoint", name)}

    def describe_endpoint(self, request: Json) -> Json:
        world, endpoint = self._world, self._endpoint(request["EndpointName"])
        variant = world.configs.get(endpoint.config, {}).get("ProductionVariants", [{}])[0]
        found: Json = {
            "EndpointName": endpoint.name,
            "EndpointArn": world.arn("endpoint", endpoint.name),
            "EndpointConfigName": endpoint.config,
            "EndpointStatus": endpoint.status,
            "CreationTime": endpoint.created,
            "LastModifiedTime": endpoint.modified,
        }
        if endpoint.reason:
            found["FailureReason"] = endpoint.reason
        if variant:
            count = variant["InitialInstanceCount"]
            counts = {"CurrentInstanceCount": count, "DesiredInstanceCount": count}
            found["ProductionVariants"] = [{"VariantName": variant["VariantName"], **counts}]
        return found

    def delete_endpoint(self, request: Json) -> Json:
        world, endpoint = self._world, self._endpoint(request["EndpointName"])
        if [c for c in world.components.values() if c.endpoint == endpoint.name]:
            raise invalid(f'Cannot delete endpoint "{endpoint.name}" while it has inference components.')
        if endpoint.status in ("Creating", "Updating", "Deleting"):
            raise invalid(f'Cannot delete endpoint "{endpoint.name}" in status {endpoint.status}.')
        endpoint.status = "Deleting"
        world.background(lambda: self._forget(endpoint))
        return {}

    def _arrive(self, endpoint: Endpoint) -> None:
        with self._world.lock:
            endpoint.reason = self._world.conduct.failing.get(endpoint.name, "")
            endpoint.status = "Failed" if endpoint.reason else "InService"
            endpoint.modified = time.time()

    def _forget(self, endpoint: Endpoint) -> None:
        with self._world.lock:
            self._world.endpoints.pop(endpoint.name, None)

    def _endpoint(self, name: str) -> Endpoint:
        if name not in self._world.endpoints:
            raise invalid(f'Could not find endpoint "{self._world.arn("endpoint", name)}".')
        return self._world.endpoints[name]

    def _check_data(self, url: str) -> None:
        place = urlsplit(url)
        found = self._world.aws("s3").list_objects_v2(Bucket=place.netloc, Prefix=place.path.lstrip("/"), MaxKeys=1)
        if not found.get("Contents"):
            raise invalid(f"Could not find model data at {url}.")

    def _new(self, kind: str, known: dict[str, Json], name: str) -> None:
        if name in known:
            raise invalid(f'Cannot create already existing {_words(kind)} "{self._world.arn(KINDS[kind], name)}".')

    def _existing(self, kind: str, known: dict[str, Json], name: str) -> Json:
        if name not in known:
            raise invalid(f'Could not find {_words(kind)} "{self._world.arn(KINDS[kind], name)}".')
        return known[name]

    def _listed(self, kind: str, known: dict[str, Json], request: Json) -> list[dict[str, Any]]:
        names = [name for name in sorted(known) if request.get("NameContains", "") in name]
        return [
            {
                f"{kind}Name": name,
                f"{kind}Arn": self._world.arn(KINDS[kind], name),
                "CreationTime": known[name]["CreationTime"],
            }
            for name in names
        ]


def _words(kind: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower().replace("config", "configuration")


def _without_tags(request: Json) -> Json:
    return {name: value for name, value in request.items() if name != "Tags"}
