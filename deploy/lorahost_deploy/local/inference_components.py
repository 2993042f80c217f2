"""SageMaker's inference components: what may be asked for, in which order, and what is answered."""

from __future__ import annotations

import secrets
import time
from typing import Any

from lorahost_deploy.local.copies import Copies
from lorahost_deploy.local.failures import invalid
from lorahost_deploy.local.state import Component, Json, World, page

# An adapter shares its base's resources, copies and variant.
NOT_FOR_ADAPTERS = ("ModelName", "ComputeResourceRequirements", "StartupParameters", "InstanceType", "SchedulingConfig")
MOVING = frozenset({"Creating", "Updating", "Deleting"})


class InferenceComponents:
    """One method for each operation, named like it in snake case; takes and returns the operation's JSON."""

    def __init__(self, world: World, copies: Copies) -> None:
        self._world = world
        self._copies = copies

    def create_inference_component(self, request: Json) -> Json:
        world, name = self._world, request["InferenceComponentName"]
        arn = world.arn("inference-component", name)
        if name in world.components:
            raise invalid(f'Cannot create already existing inference component "{arn}".')
        if "Specification" not in request:
            raise invalid("lorahost local-aws takes one Specification.")
        endpoint = world.endpoints.get(request["EndpointName"])
        if endpoint is None:
            raise invalid(f'Could not find endpoint "{world.arn("endpoint", request["EndpointName"])}".')
        if endpoint.status != "InService":
            raise invalid(f'Endpoint "{endpoint.name}" is {endpoint.status}; it must be InService.')
        specification = request["Specification"]
        if "BaseInferenceComponentName" in specification:
            component = self._new_adapter(request, specification)
        else:
            component = self._new_base(request, specification)
        world.components[name] = component
        world.background(lambda: self._copies.bring_up(component))
        return {"InferenceComponentArn": arn}

    def _new_adapter(self, request: Json, specification: Json) -> Component:
        name, base_name = request["InferenceComponentName"], specification["BaseInferenceComponentName"]
        extra = [field for field in NOT_FOR_ADAPTERS if field in specification]
        extra += [field for field in ("VariantName", "RuntimeConfig") if field in request]
        if extra:
            raise invalid(f"{', '.join(extra)} cannot be set when BaseInferenceComponentName is set.")
        container = specification.get("Container", {})
        if set(container) != {"ArtifactUrl"}:
            raise invalid("An adapter inference component needs Container.ArtifactUrl, and nothing else in Container.")
        base = self._world.component(base_name)
        if base.base or base.endpoint != request["EndpointName"]:
            raise invalid(f'"{base_name}" is no base inference component of endpoint "{request["EndpointName"]}".')
        if base.status != "InService":
            raise invalid(f'Base inference component "{base_name}" is {base.status}; it must be InService.')
        identifier = f"{name}-{secrets.token_hex(4)}"
        return Component(name, base.endpoint, specification, base.variant, base_name, identifier=identifier)

    def _new_base(self, request: Json, specification: Json) -> Component:
        missing = [field for field in ("VariantName", "RuntimeConfig") if field not in request]
        missing += ["Specification.ComputeResourceRequirements"] * ("ComputeResourceRequirements" not in specification)
        if missing:
            raise invalid(f"{', '.join(missing)} must be set for an inference component with a model.")
        self._check_base(specification)
        endpoint = self._world.endpoints[request["EndpointName"]]
        variants = self._world.configs[endpoint.config]["ProductionVariants"]
        if request["VariantName"] not in [variant["VariantName"] for variant in variants]:
            raise invalid(f'Endpoint "{endpoint.name}" has no variant "{request["VariantName"]}".')
        copies = request["RuntimeConfig"]["CopyCount"]
        return Component(
            request["InferenceComponentName"], endpoint.name, specification, request["VariantName"], copies=copies
        )

    def _check_base(self, specification: Json) -> None:
        model = specification.get("ModelName")
        if (model is None) == ("Container" not in specification):
            raise invalid("Specification needs either ModelName or Container.")
        if model is not None and model not in self._world.models:
            raise invalid(f'Could not find model "{self._world.arn("model", model)}".')

    def describe_inference_component(self, request: Json) -> Json:
        world, component = self._world, self._world.component(request["InferenceComponentName"])
        return {
            **self._summary(component),
            "Specification": _described(component.specification),
            **({"FailureReason": component.reason} if component.reason else {}),
            **({} if component.base else {"RuntimeConfig": _copies(component)}),
            "EndpointArn": world.arn("endpoint", component.endpoint),
        }

    def list_inference_components(self, request: Json) -> Json:
        wanted = {
            "endpoint": request.get("EndpointNameEquals"),
            "variant": request.get("VariantNameEquals"),
            "status": request.get("StatusEquals"),
        }
        found = [
            self._summary(c)
            for _, c in sorted(self._world.components.items())
            if request.get("NameContains", "") in c.name
            and all(value is None or getattr(c, field) == value for field, value in wanted.items())
        ]
        return page("InferenceComponents", found, request)

    def update_inference_component(self, request: Json) -> Json:
        world, component = self._world, self._still(request["InferenceComponentName"])
        specification = request.get("Specification")
        if component.status == "Failed":
            raise invalid(f'Cannot update inference component "{component.name}" in status Failed.')
        if specification and component.base:
            if set(specification) != {"Container"} or set(specification["Container"]) != {"ArtifactUrl"}:
                raise invalid("Only Container.ArtifactUrl of an adapter inference component can be updated.")
            specification = {**component.specification, **specification}
        elif specification:
            self._check_base(specification)
            specification = {**component.specification, **specification}
        if copies := request.get("RuntimeConfig"):
            component.copies = copies["CopyCount"]
        component.status = "Updating"
        world.background(lambda: self._copies.change(component, specification or component.specification))
        return {"InferenceComponentArn": world.arn("inference-component", component.name)}

    def update_inference_component_runtime_config(self, request: Json) -> Json:
        component = self._still(request["InferenceComponentName"])
        if component.base:
            raise invalid(f'"{component.name}" is an adapter: it has the copies of "{component.base}".')
        self._copies.set_count(component, request["DesiredRuntimeConfig"]["CopyCount"])
        return {"InferenceComponentArn": self._world.arn("inference-component", component.name)}

    def delete_inference_component(self, request: Json) -> Json:
        component = self._still(request["InferenceComponentName"])
        if adapters := [c.name for c in self._world.adapters_of(component.name)]:
            raise invalid(f'Cannot delete "{component.name}": {len(adapters)} adapter inference components use it.')
        component.status = "Deleting"
        self._world.background(lambda: self._copies.take_down(component))
        return {}

    def _still(self, name: str) -> Component:
        component = self._world.component(name)
        if component.status in MOVING:
            raise invalid(f'Inference component "{name}" is {component.status}; wait until it is not.')
        return component

    def _summary(self, component: Component) -> Json:
        world = self._world
        return {
            "InferenceComponentName": component.name,
            "InferenceComponentArn": world.arn("inference-component", component.name),
            "EndpointName": component.endpoint,
            "EndpointArn": world.arn("endpoint", component.endpoint),
            "VariantName": component.variant,
            "InferenceComponentStatus": component.status,
            "CreationTime": component.created,
            "LastModifiedTime": component.modified or time.time(),
        }


def _copies(component: Component) -> dict[str, Any]:
    return {"DesiredCopyCount": component.copies, "CurrentCopyCount": len(component.containers)}


def _described(specification: Json) -> Json:
    """A specification as Describe gives it."""
    found = dict(specification)
    if container := found.pop("Container", None):
        image = {"DeployedImage": {"SpecifiedImage": container["Image"]}} if "Image" in container else {}
        found["Container"] = {**image, **{k: v for k, v in container.items() if k in ("ArtifactUrl", "Environment")}}
    return found
