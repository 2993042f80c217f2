"""Sorts requests by service: SageMaker, autoscaling and Bedrock's import are played here, the rest by moto."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from botocore import xform_name
from werkzeug import Request, Response

from lorahost_deploy import strict
from lorahost_deploy.local.autoscaling import Autoscaling
from lorahost_deploy.local.bedrock import Bedrock
from lorahost_deploy.local.copies import Copies
from lorahost_deploy.local.endpoints import Endpoints
from lorahost_deploy.local.failures import ApiError, denied
from lorahost_deploy.local.inference_components import InferenceComponents
from lorahost_deploy.local.runtime import Runtime
from lorahost_deploy.local.state import CALLER, World

log = logging.getLogger(__name__)
SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")
JSON_11 = "application/x-amz-json-1.1"
SERVICES = {"SageMaker": "sagemaker", "AnyScaleFrontendService": "application-autoscaling"}
S3_ACTIONS = {"PUT": "s3:PutObject", "GET": "s3:GetObject", "HEAD": "s3:GetObject", "DELETE": "s3:DeleteObject"}
XML_DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
Wsgi = Callable[..., Iterable[bytes]]


class App:
    """The WSGI application.

    Args:
        models: Service models of botocore, by service.
        moto: The application for all other services.
    """

    def __init__(self, world: World, models: dict[str, Any], moto: Wsgi) -> None:
        copies = Copies(world)
        autoscaling = Autoscaling(world, copies)
        self._world = world
        self._models = models
        self._moto = moto
        self._runtime = Runtime(world, autoscaling)
        self.bedrock = Bedrock(world)
        self._handlers: dict[str, tuple[Any, ...]] = {
            "sagemaker": (Endpoints(world), InferenceComponents(world, copies)),
            "application-autoscaling": (autoscaling,),
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answers one request."""
        request = Request(environ)
        scope = SCOPE.search(request.headers.get("Authorization", ""))
        service = scope[1] if scope else ""
        prefix, _, operation = request.headers.get("X-Amz-Target", "").partition(".")
        try:
            if service == "s3" and S3_ACTIONS.get(request.method) in self._world.conduct.deny:
                return Response(XML_DENIED, 403, content_type="application/xml")(environ, start_response)
            if prefix in SERVICES:
                return self._json(request, SERVICES[prefix], operation)(environ, start_response)
            if service == "sagemaker" and request.path.startswith("/endpoints/"):
                self._check_allowed("sagemaker:InvokeEndpoint")
                return self._runtime(request)(environ, start_response)
            if service == "bedrock" and self.bedrock.plays(request):
                return self.bedrock(request)(environ, start_response)
        except ApiError as error:
            return _error(error)(environ, start_response)
        return self._moto(environ, start_response)

    def _json(self, request: Request, service: str, operation: str) -> Response:
        """One operation of a JSON protocol, with request and answer checked against the service's model."""
        self._check_allowed(f"{service}:{operation}")
        model = self._models[service].operation_model(operation)
        body = json.loads(request.get_data() or b"{}")
        if found := list(strict.problems(model.input_shape, body)):
            count = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected"
            raise ApiError("ValidationException", f"{count}: {'; '.join(found)}")
        method = next((m for h in self._handlers[service] if (m := getattr(h, xform_name(operation), None))), None)
        if method is None:
            raise ApiError("UnknownOperationException", f"lorahost local-aws does not play {service} {operation}.")
        with self._world.lock:
            answer = method(body)
        if model.output_shape is not None and (found := list(strict.problems(model.output_shape, answer))):
            log.error("%s: an answer that AWS would not give: %s", operation, found)
            raise ApiError("InternalFailure", f"{operation}: {'; '.join(found)}", 500)
        return Response(json.dumps(answer), 200, {"x-amzn-RequestId": str(uuid4())}, content_type=JSON_11)

    def _check_allowed(self, action: str) -> None:
        if action in self._world.conduct.deny:
            raise denied(CALLER, action)


def _error(error: ApiError) -> Response:
    # the control plane's clients read __type and message, the runtime's the header and Message
    body = {"__type": error.code, "message": error.message, "Message": error.message}
    return Response(json.dumps(body), error.status, {"x-amzn-ErrorType": error.code}, content_type=JSON_11)
