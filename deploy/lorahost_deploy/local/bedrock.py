"""Bedrock's model import and the invocation of what was imported, as far as deployment uses them.

An imported model runs in a container of its own, loaded with its first request as in Bedrock.
"""

from __future__ import annotations

import json
import secrets
import threading
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

from werkzeug import Request, Response

from lorahost_deploy.local import artifacts
from lorahost_deploy.local.containers import Container, ContainerError
from lorahost_deploy.local.failures import ApiError
from lorahost_deploy.local.state import ACCOUNT, Json, World

LOAD_S = 600.0
ANSWER_S = 300.0


class Bedrock:
    """CreateModelImportJob and what follows it; paths are those of the REST API."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.jobs: dict[str, Json] = {}
        self.models: dict[str, Json] = {}
        self._containers: dict[str, Container | None] = {}
        self._loading = threading.Lock()

    def plays(self, request: Request) -> bool:
        """Whether a request signed for Bedrock is one of these."""
        return request.path.startswith(("/model-import-jobs", "/imported-models/", "/model/"))

    def __call__(self, request: Request) -> Response:
        """Answers one request."""
        _, kind, *rest = request.path.split("/", 2)
        name = unquote(rest[0]) if rest else ""
        if kind == "model":
            return self._invoke(request, name.removesuffix("/invoke"))
        if kind == "model-import-jobs" and request.method == "POST":
            return _answer(self._create(json.loads(request.get_data())), 201)
        known = self.jobs if kind == "model-import-jobs" else self.models
        found = _named(known, name)
        if request.method == "DELETE":
            del known[found["modelName"]]
            if container := self._containers.pop(found["modelName"], None):
                container.stop()
            return _answer({})
        return _answer(found)

    def _create(self, request: Json) -> Json:
        job, model = request["jobName"], request["importedModelName"]
        if job in self.jobs:
            raise ApiError("ConflictException", f"The job name {job} is in use.")
        if model in self.models:
            raise ApiError("ConflictException", f"The model name {model} is in use.")
        arn = f"arn:aws:bedrock:{self._world.region}:{ACCOUNT}:model-import-job/{secrets.token_hex(6)}"
        self.jobs[job] = {**request, "jobArn": arn, "status": "InProgress", "creationTime": _now()}
        self._world.background(lambda: self._finish(job, request))
        return {"jobArn": arn}

    def _finish(self, job: str, request: Json) -> None:
        name, url = request["importedModelName"], request["modelDataSource"]["s3DataSource"]["s3Uri"]
        place = urlsplit(url)
        prefix = place.path.lstrip("/")
        listed = self._world.aws("s3").list_objects_v2(Bucket=place.netloc, Prefix=prefix).get("Contents", [])
        files = {item["Key"].removeprefix(prefix) for item in listed}
        reason = self._world.conduct.failing.get(name, "")
        if not reason and "config.json" not in files:
            reason = f"no config.json at {url}"
        if reason:
            self.jobs[job] |= {"status": "Failed", "failureMessage": reason, "endTime": _now()}
            return
        arn = f"arn:aws:bedrock:{self._world.region}:{ACCOUNT}:imported-model/{secrets.token_hex(6)}"
        source = {"modelDataSource": request["modelDataSource"], "jobName": job}
        self.models[name] = {"modelName": name, "modelArn": arn, "creationTime": _now(), **source}
        self.jobs[job] |= {"status": "Completed", "importedModelArn": arn, "endTime": _now()}

    def _invoke(self, request: Request, identifier: str) -> Response:
        model = _named(self.models, identifier)
        container = self._container(model)
        connection = container.connect(ANSWER_S)
        try:
            # the container knows its model by its base name
            connection.request("POST", "/model/base/invoke", request.get_data(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            kept = {k: v for k, v in answer.headers.items() if k.lower() in ("content-type", "x-amzn-errortype")}
            return Response(answer.read(), answer.status, kept)
        finally:
            connection.close()

    def _container(self, model: Json) -> Container:
        """The model's container; the first request starts it and is told to come back."""
        name = model["modelName"]
        with self._loading:
            if name not in self._containers:
                self._containers[name] = None
                self._world.background(lambda: self._load(model))
            container = self._containers[name]
        if container is None:
            raise ApiError("ModelNotReadyException", f"Model {name} is not ready for inference.", 429)
        return container

    def _load(self, model: Json) -> None:
        source = {"ModelDataSource": {"S3DataSource": {"S3Uri": model["modelDataSource"]["s3DataSource"]["s3Uri"]}}}
        environment = {"LORAHOST_BEDROCK": "on", "LORAHOST_BASE_NAME": "base"}
        container = self._world.launcher.launch(environment, artifacts.model_directory(self._world, source))
        try:
            container.wait_ready(LOAD_S)
        except ContainerError:
            container.stop()
            with self._loading:
                self._containers.pop(model["modelName"], None)
            return
        self._containers[model["modelName"]] = container


def _named(known: dict[str, Json], identifier: str) -> Json:
    for name, found in known.items():
        if identifier in (name, found.get("modelArn"), found.get("jobArn")):
            return found
    raise ApiError("ResourceNotFoundException", f"The provided identifier {identifier} was not found.", 404)


def _answer(body: Json, status: int = 200) -> Response:
    return Response(json.dumps(body), status, content_type="application/json")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
