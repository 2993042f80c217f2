"""SageMaker's runtime: finds a container for an inference component and hands the request on."""

from __future__ import annotations

import http.client
import itertools
import json
import random
from collections.abc import Iterator

from werkzeug import Request, Response

from lorahost_deploy.local import forward
from lorahost_deploy.local.autoscaling import Autoscaling
from lorahost_deploy.local.containers import Container
from lorahost_deploy.local.failures import ApiError
from lorahost_deploy.local.state import ACCOUNT, Component, World
from lorahost_deploy.waiting import component_logs

ANSWER_S = 60.0
STREAM_S = 480.0
SERVING = frozenset({"InService", "Updating"})


class Runtime:
    """InvokeEndpoint and InvokeEndpointWithResponseStream."""

    def __init__(self, world: World, autoscaling: Autoscaling) -> None:
        self._world = world
        self._autoscaling = autoscaling
        self._turn = itertools.count()
        self._sessions: dict[str, Container] = {}
        self._cuts = random.Random(11)

    def __call__(self, request: Request) -> Response:
        """Answers one request; container errors become ModelError."""
        _, _, endpoint, operation = request.path.split("/")
        component = self._component(endpoint, request.headers.get(forward.PREFIX + "Inference-Component"))
        base = self._world.component(component.base) if component.base else component
        if not base.containers:
            self._autoscaling.no_capacity(base.name, component.name)
            raise ApiError(
                "ValidationError", f"Inference Component {component.name} has no capacity: it has no copies."
            )
        session = request.headers.get(forward.PREFIX + "Session-Id", "")
        container = self._sessions.get(session) or base.containers[next(self._turn) % len(base.containers)]
        stream = operation == forward.STREAM_PATH
        alias = component.name if component.base else None
        headers = forward.container_headers(
            request.headers, stream=stream, identifier=component.identifier or None, alias=alias
        )
        connection = container.connect(STREAM_S if stream else ANSWER_S)
        try:
            connection.request("POST", "/invocations", request.get_data(), headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            text = f"the container did not answer: {error}"
            return self._model_error(base.name, 500, text)
        if answer.status != 200:
            return self._model_error(base.name, answer.status, answer.read().decode(errors="replace"))
        if stream:
            sent = forward.caller_headers(answer, forward.PREFIX + "Content-Type")
            return Response(self._events(connection, answer), 200, sent, content_type=forward.EVENT_STREAM)
        sent = forward.caller_headers(answer, "Content-Type")
        sent["x-Amzn-Invoked-Production-Variant"] = component.variant
        self._note_session(sent, container)
        body = answer.read()
        connection.close()
        return Response(body, 200, sent)

    def _component(self, endpoint: str, name: str | None) -> Component:
        if endpoint not in self._world.endpoints:
            raise ApiError("ValidationError", f"Endpoint {endpoint} of account {ACCOUNT} not found.")
        if name is None:
            raise ApiError(
                "ValidationError",
                "Inference Component Name header is required for endpoints to which you plan to deploy inference "
                "components. Please include Inference Component Name header or consider using SageMaker models.",
            )
        component = self._world.components.get(name)
        if component is None or component.endpoint != endpoint:
            raise ApiError("ValidationError", f"Inference Component {name} of endpoint {endpoint} not found.")
        if component.status not in SERVING:
            raise ApiError("ValidationError", f"Inference Component {name} is {component.status}, not InService.")
        return component

    def _events(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        """The container's body as event-stream frames; ends with the connection when the caller goes away."""
        try:
            for piece in forward.cut(answer, self._cuts):
                yield forward.part(piece)
        except (OSError, http.client.HTTPException) as error:
            yield forward.broken(f"the container ended its stream: {error}")
        finally:
            connection.close()

    def _note_session(self, headers: dict[str, str], container: Container) -> None:
        """Later requests of a session go to the container that opened it."""
        if opened := headers.get(forward.PREFIX + "New-Session-Id"):
            self._sessions[opened.partition(";")[0]] = container
        if closed := headers.get(forward.PREFIX + "Closed-Session-Id"):
            self._sessions.pop(closed, None)

    def _model_error(self, base: str, status: int, text: str) -> Response:
        arn = f"arn:aws:logs:{self._world.region}:{ACCOUNT}:log-group:{component_logs(base)}"
        body = json.dumps(forward.model_error(status, text, arn))
        return Response(body, 424, {"x-amzn-ErrorType": "ModelError"}, content_type="application/json")
