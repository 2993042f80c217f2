"""The Flask application: routes, and errors as JSON whatever happens."""

from __future__ import annotations

import logging

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from lorahost.errors import EngineFailedError, HostError, InvalidRequestError
from lorahost.host import Host
from lorahost.http import adapters, bedrock, health, invocations, models
from lorahost.http.bodies import discard_body
from lorahost.http.exchange import error_head

log = logging.getLogger(__name__)


def create_app(host: Host) -> Flask:
    """An application around a host that has been started, or will be."""
    app = Flask("lorahost", static_folder=None)
    app.url_map.strict_slashes = False
    # an adapter's name may be a path: it must reach its route as it was sent
    app.url_map.merge_slashes = False
    for module in (health, invocations, adapters, models, bedrock):
        module.add_routes(app, host)
    app.register_error_handler(HostError, _host_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _other_error)
    app.after_request(_without_body)
    return app


def answer_error(error: HostError) -> Response:
    """An error as a response."""
    head = error_head(error)
    return Response(head.body, status=head.status, headers=dict(head.headers))


def _without_body(response: Response) -> Response:
    discard_body(request.environ)
    return response


def _host_error(error: HostError) -> Response:
    return answer_error(error)


def _http_error(error: HTTPException) -> Response:
    status = error.code or 500
    response = answer_error(
        InvalidRequestError(error.description or error.name, code=error.name.lower().replace(" ", "_"), status=status)
    )
    if allow := dict(error.get_headers()).get("Allow"):
        response.headers["Allow"] = allow
    return response


def _other_error(error: Exception) -> Response:
    log.exception("request failed", exc_info=error)
    return answer_error(EngineFailedError(f"internal error: {type(error).__name__}", code="internal_error"))
