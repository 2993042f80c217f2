"""What happens on the containers when inference components come, change and go."""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lorahost_deploy.local import artifacts
from lorahost_deploy.local.containers import Container, ContainerError
from lorahost_deploy.local.state import ACCOUNT, Component, Json, World

log = logging.getLogger(__name__)
START_S = 3600.0


class Copies:
    """Carries out changes, each in a thread of its own; a component's status says how it went."""

    def __init__(self, world: World) -> None:
        self._world = world

    def bring_up(self, component: Component) -> None:
        """Starts a base's containers, or registers an adapter on all of them."""
        self._carry_out(component, lambda: self._up(component))

    def _up(self, component: Component) -> None:
        if component.base:
            for container in self._world.component(component.base).containers:
                self._register(component, container)
        else:
            self._scale(component)

    def change(self, component: Component, specification: Json) -> None:
        """Gives a component another specification."""
        self._carry_out(component, lambda: self._change(component, specification))

    def _change(self, component: Component, specification: Json) -> None:
        differs = specification != component.specification
        component.specification = specification
        if component.base and differs:
            # SageMaker unregisters first; in between the adapter is unknown, and nobody else answers for it.
            for container in self._world.component(component.base).containers:
                self._unregister(component, container)
                self._register(component, container)
        elif differs:
            old, component.containers = component.containers, []
            try:
                self._scale(component)
            except (ContainerError, artifacts.ArtifactError):
                component.containers = [*component.containers, *old]
                raise
            for container in old:
                container.stop()
        else:
            self._scale(component)

    def set_count(self, component: Component, count: int) -> None:
        """Starts or stops containers until there are `count`."""
        component.copies, component.status = count, "Updating"
        self._world.background(lambda: self._carry_out(component, lambda: self._scale(component)))

    def take_down(self, component: Component) -> None:
        """Removes a component and what it holds."""
        self._carry_out(component, lambda: self._down(component))

    def _down(self, component: Component) -> None:
        if component.base and component.base in self._world.components:
            for container in self._world.components[component.base].containers:
                self._unregister(component, container)
        component.copies = 0
        if not component.base:
            self._scale(component)
        with self._world.lock:
            self._world.components.pop(component.name, None)

    def _carry_out(self, component: Component, work: Callable[[], None]) -> None:
        reason = self._world.conduct.failing.get(component.name, "")
        try:
            if not reason:
                work()
        except (ContainerError, artifacts.ArtifactError) as error:
            reason = str(error)
            self._publish(component)
        except Exception as error:  # a thread that dies would leave the component on its way for ever
            log.exception("component %s", component.name)
            reason = f"Internal failure: {error!r}"
        with self._world.lock:
            component.reason = reason
            component.status = "Failed" if reason else "InService"
            component.modified = time.time()

    def _scale(self, component: Component) -> None:
        while len(component.containers) > component.copies:
            component.containers.pop().stop()
        while len(component.containers) < component.copies:
            component.containers.append(self._start(component))

    def _start(self, component: Component) -> Container:
        """A new container with all adapters of its component; it gets no requests before."""
        model = self._model(component.specification)
        folder = artifacts.model_directory(self._world, model)
        timeouts = component.specification.get("StartupParameters", {})
        container = self._world.launcher.launch(model.get("Environment", {}), folder)
        try:
            container.wait_ready(timeouts.get("ContainerStartupHealthCheckTimeoutInSeconds", START_S))
            for adapter in self._world.adapters_of(component.name):
                if adapter.status != "Failed":
                    self._register(adapter, container)
        except ContainerError as error:
            container.stop()
            artifacts.publish_log(self._world, component.name, container.log_tail())
            raise ContainerError(
                f"{error} Please check CloudWatch logs for this inference component.", error.status
            ) from error
        return container

    def _model(self, specification: Json) -> Json:
        if "Container" in specification:
            found: Json = specification["Container"]
        else:
            found = self._world.models[specification["ModelName"]].get("PrimaryContainer", {})
        return found

    def _register(self, adapter: Component, container: Container) -> None:
        """Unpacks the adapter where the container sees it, and tells the container."""
        stamp = f"{int(time.time() * 1000)}-MaeveWestworldService-{secrets.token_hex(6)}"
        directory = container.root / f"container_{ACCOUNT}-{adapter.name}-{stamp}"
        artifacts.unpack(self._world, adapter.specification["Container"]["ArtifactUrl"], directory)
        try:
            container.register(adapter.identifier, adapter.name, directory)
        except ContainerError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._remove_directory(adapter.directories.get(container.url))
        adapter.directories[container.url] = directory

    def _unregister(self, adapter: Component, container: Container) -> None:
        container.unregister(adapter.identifier, adapter.name)
        self._remove_directory(adapter.directories.pop(container.url, None))

    @staticmethod
    def _remove_directory(directory: Path | None) -> None:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def _publish(self, component: Component) -> None:
        """Puts the containers' last lines into the base's log group, where the real ones are."""
        base = self._world.components.get(component.base or component.name)
        for container in base.containers if base else []:
            artifacts.publish_log(self._world, base.name if base else "", container.log_tail())
