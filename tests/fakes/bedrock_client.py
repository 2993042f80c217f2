"""boto3's view of Bedrock's runtime API: clients, and botocore's parsers over bytes cut anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.eventstream import EventStream
from botocore.loaders import Loader
from botocore.model import OperationModel, ServiceModel
from botocore.parsers import create_parser

HI = [{"role": "user", "content": [{"text": "hi there"}]}]


def client(url: str) -> Any:
    """A bedrock-runtime client that tries once."""
    return boto3.client(
        "bedrock-runtime",
        region_name="eu-west-1",
        endpoint_url=url,
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=Config(retries={"max_attempts": 0}, read_timeout=60),
    )


@cache
def service() -> ServiceModel:
    """Bedrock's service model, as botocore ships it."""
    return ServiceModel(Loader().load_service_model("bedrock-runtime", "service-2"), "bedrock-runtime")


def operation(name: str) -> OperationModel:
    """One operation of it."""
    return service().operation_model(name)


def parsed(name: str, body: Any) -> dict[str, Any]:
    """A JSON answer of operation `name` as botocore reads it; what its model lacks is dropped."""
    shape = operation(name).output_shape
    response = {"status_code": 200, "headers": {}, "body": json.dumps(body).encode(), "context": {}}
    read: dict[str, Any] = create_parser("rest-json").parse(response, shape)
    read.pop("ResponseMetadata")
    return read


class CutStream:
    """A response's raw stream, handed out in pieces of random sizes."""

    def __init__(self, data: bytes, seed: int) -> None:
        self._data = data
        self._random = random.Random(seed)

    def stream(self) -> Iterator[bytes]:
        """The pieces."""
        position = 0
        while position < len(self._data):
            size = self._random.choice((1, 2, 3, 7, 64, 1000))
            yield self._data[position : position + size]
            position += size

    def close(self) -> None:
        """Nothing to close."""


def events(name: str, data: bytes, seed: int = 0) -> list[dict[str, Any]]:
    """The events of operation `name` in `data`; raises botocore's EventStreamError at an exception."""
    shape = operation(name).get_event_stream_output()
    parser = create_parser("rest-json")._event_stream_parser
    return list(EventStream(CutStream(data, seed), shape, parser, name))
