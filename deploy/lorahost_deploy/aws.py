"""One account and region as a verb sees it: what it reads, and what it changes, or would change in a dry run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lorahost_deploy import console, strict
from lorahost_deploy.errors import DeployError, explain, is_missing

UNKNOWN_ACCOUNT = "000000000000"
UNKNOWN_REGION = "us-east-1"


class Aws:
    """Clients of one session; every request is checked against the service's model before it leaves.

    Args:
        region: Region, by default the environment's or the profile's.
        profile: A profile of the AWS configuration.
        endpoint_url: Where all services are, for `lorahost local-aws`.
        dry_run: Changes are checked and collected, not made. Without credentials the account counts as empty.
        poll_s: Seconds between two looks at something that is waited for.
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        profile: str | None = None,
        endpoint_url: str | None = None,
        dry_run: bool = False,
        poll_s: float = 15.0,
    ) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError as error:
            raise DeployError(f"no module {error.name}: pip install -e '.[deploy]' in a checkout") from error

        self._session: Any = boto3.Session(profile_name=profile, region_name=region)
        self._session.events.register("before-parameter-build", _check)
        self._config = Config(retries={"mode": "standard", "max_attempts": 4}, read_timeout=75)
        self._url = endpoint_url
        self._clients: dict[str, Any] = {}
        self._account = ""
        self.dry_run = dry_run
        self.poll_s = poll_s
        self.offline = False
        self.requests: list[dict[str, Any]] = []
        if not (self._session.region_name or dry_run):
            raise DeployError("no region: set AWS_REGION or give --region")
        self.region: str = self._session.region_name or UNKNOWN_REGION

    def client(self, service: str) -> Any:
        """The boto3 client of a service."""
        if service not in self._clients:
            self._clients[service] = self._session.client(
                service, region_name=self.region, endpoint_url=self._url, config=self._config
            )
        return self._clients[service]

    @property
    def account(self) -> str:
        """The account's number."""
        if not self._account:
            answer = self.find("sts", "GetCallerIdentity")
            self._account = answer["Account"] if answer else UNKNOWN_ACCOUNT
        return self._account

    @property
    def partition(self) -> str:
        """`aws`, `aws-cn`, `aws-us-gov`."""
        return str(self._session.get_partition_for_region(self.region))

    def find(self, service: str, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """The answer to a reading operation; None when what it asks for does not exist.

        Raises:
            DeployError: it failed otherwise; the message says what to do.
        """
        return self._send(service, operation, parameters, reading=True)

    def read(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """As `find`, for what must exist."""
        answer = self.find(service, operation, **parameters)
        if answer is None:
            raise DeployError(f"{operation}: there is no {_shown(parameters)} in {self.region}")
        return answer

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """All items below `key` of all pages of a reading operation; none when what it asks for does not exist."""
        token: dict[str, str] = {}
        while True:
            answer = self.find(service, operation, **parameters, **token) or {}
            yield from answer.get(key, [])
            following = next((n for n in ("NextToken", "nextToken", "NextContinuationToken") if answer.get(n)), None)
            if following is None:
                return
            name = "ContinuationToken" if following == "NextContinuationToken" else following
            token = {name: answer[following]}

    def change(
        self, service: str, operation: str, parameters: Mapping[str, Any], assumed: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes a change; in a dry run collects it and answers `assumed`."""
        strict.check(self._model(service, operation), parameters)
        if self.dry_run:
            self.requests.append({"service": service, "operation": operation, "parameters": dict(parameters)})
            return assumed or {}
        return self._send(service, operation, dict(parameters), reading=False) or {}

    def remove(self, service: str, operation: str, **parameters: Any) -> None:
        """As `change`, for deletions: what is gone already is fine."""
        strict.check(self._model(service, operation), parameters)
        if self.dry_run:
            self.change(service, operation, parameters)
            return
        self._send(service, operation, parameters, reading=True)

    def upload(self, path: Path, bucket: str, key: str, what: str) -> None:
        """Uploads a file with progress; large ones in parts, each with a SHA-256 checksum."""
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import ClientError

        size = path.stat().st_size
        parameters = {"Bucket": bucket, "Key": key, "ChecksumAlgorithm": "SHA256"}
        if self.dry_run:
            self.change("s3", "PutObject", {**parameters, "Body": f"<{path.name}, {size} bytes>"})
            return
        extra = {"ChecksumAlgorithm": "SHA256"}
        try:
            with console.uploading(what, size) as advance:
                self.client("s3").upload_file(str(path), bucket, key, Callback=advance, ExtraArgs=extra)
        except ClientError as error:
            raise explain(error, "s3", "PutObject", parameters) from error
        except S3UploadFailedError as error:
            cause = error.__cause__ or error.__context__
            if isinstance(cause, ClientError):
                raise explain(cause, "s3", "PutObject", parameters) from error
            raise DeployError(f"upload of {path.name} to s3://{bucket}/{key} failed: {error}") from error

    def sleep(self) -> None:
        """Waits for the next look."""
        time.sleep(self.poll_s)

    def print_requests(self) -> None:
        """A dry run's result: the changes in order, as JSON on standard output."""
        click.echo(json.dumps(self.requests, indent=2, default=str))

    def _model(self, service: str, operation: str) -> Any:
        return self.client(service).meta.service_model.operation_model(operation)

    def _send(
        self, service: str, operation: str, parameters: dict[str, Any], *, reading: bool
    ) -> dict[str, Any] | None:
        from botocore import xform_name
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        if self.offline:
            return None
        try:
            answer: dict[str, Any] = getattr(self.client(service), xform_name(operation))(**parameters)
        except ClientError as error:
            if reading and is_missing(error):
                return None
            raise explain(error, service, operation, parameters) from error
        except NoCredentialsError as error:
            if not self.dry_run:
                raise DeployError("no AWS credentials: run `aws configure` or set AWS_PROFILE") from error
            self.offline = True
            console.say("no AWS credentials: this dry run takes the account for empty")
            return None
        except BotoCoreError as error:
            raise DeployError(f"{service} {operation}: {error}") from error
        return answer


def _check(params: Mapping[str, Any], model: Any, **_: Any) -> None:
    strict.check(model, params)


def _shown(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in parameters.items())
