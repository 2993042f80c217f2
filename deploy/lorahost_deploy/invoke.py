"""`lorahost deploy invoke`: one request to an adapter, whole or token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from lorahost_deploy import console
from lorahost_deploy.aws import Aws
from lorahost_deploy.errors import DeployError
from lorahost_deploy.options import endpoint_option, verb
from lorahost_deploy.plan import base_of


@click.command("invoke")
@endpoint_option
@click.option("--adapter", help="Inference component of the adapter; without it the base model answers.")
@click.option("--prompt", help="Asked as one chat message.")
@click.option("--body", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A whole JSON body instead.")
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--temperature", type=float)
@click.option("--stream", is_flag=True, help="Print tokens as they come.")
@verb
def invoke(
    aws: Aws,
    endpoint: str,
    adapter: str | None,
    prompt: str | None,
    body: Path | None,
    max_tokens: int,
    temperature: float | None,
    stream: bool,
) -> None:
    """Ask the base model or an adapter."""
    if (prompt is None) == (body is None):
        raise DeployError("give either --prompt or --body")
    if body is None:
        sampling = {} if temperature is None else {"temperature": temperature}
        message = {"role": "user", "content": prompt}
        sent = json.dumps({"messages": [message], "max_tokens": max_tokens, **sampling})
    else:
        sent = body.read_text()
    request = {
        "EndpointName": endpoint,
        "InferenceComponentName": adapter or base_of(endpoint),
        "ContentType": "application/json",
        "Body": sent if aws.dry_run else sent.encode(),
    }
    operation = "InvokeEndpointWithResponseStream" if stream else "InvokeEndpoint"
    if stream:
        request["Accept"] = "text/event-stream"
    answer = aws.change("sagemaker-runtime", operation, request)
    if aws.dry_run:
        return
    if stream:
        for text in texts(parts(answer["Body"])):
            click.echo(text, nl=False)
        click.echo()
    else:
        click.echo(whole_text(answer["Body"].read()))
    console.say(f"answered by {answer.get('CustomAttributes', 'an unknown version')}")


def parts(events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """The bytes in an event stream.

    Raises:
        DeployError: SageMaker ended the stream with an error.
    """
    from botocore.exceptions import EventStreamError

    try:
        for event in events:
            yield event["PayloadPart"]["Bytes"]
    except EventStreamError as error:
        raise DeployError(f"the stream broke: {error}") from error


def texts(pieces: Iterable[bytes]) -> Iterator[str]:
    """The generated text in a stream of server-sent events that is cut anywhere, characters included.

    Raises:
        DeployError: the server reported an error in the stream, or it ended in the middle.
    """
    held = b""
    done = False
    for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                done = done or data == b"[DONE]"
                if data != b"[DONE]":
                    yield _text(json.loads(data))
    if not done:
        raise DeployError("the stream ended before its end mark")


def whole_text(body: bytes) -> str:
    """The generated text of a whole answer; the answer itself when it holds none."""
    return _text(json.loads(body)) or body.decode()


def _text(event: Any) -> str:
    if isinstance(event, dict) and "error" in event:
        raise DeployError(f"the server reported: {event['error'].get('message', event['error'])}")
    if isinstance(event, dict) and event.get("choices"):
        choice = event["choices"][0]
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        return said.get("content") or ""
    if isinstance(event, dict) and "generated_text" in event:
        return str(event["generated_text"])
    return ""
