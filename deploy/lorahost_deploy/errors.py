"""What a person who deploys sees when something fails."""

from __future__ import annotations

from typing import Any

import click

ACTION_PREFIXES = {"sagemaker-runtime": "sagemaker", "bedrock-runtime": "bedrock"}
# the one operation whose IAM action has another name
ACTIONS = {
    "InvokeEndpointWithResponseStream": "InvokeEndpoint",
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
}
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
QUOTA = frozenset({"ResourceLimitExceeded", "LimitExceededException", "LimitExceeded", "ServiceQuotaExceededException"})
MISSING = frozenset(
    {
        "404",
        "NoSuchEntity",
        "NoSuchKey",
        "NoSuchBucket",
        "RepositoryNotFoundException",
        "LifecyclePolicyNotFoundException",
        "ResourceNotFound",
        "ResourceNotFoundException",
        "ObjectNotFoundException",
    }
)
CREDENTIALS = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"}
)


class DeployError(click.ClickException):
    """Something that the person can act on; the message names it."""


def code_of(error: Any) -> str:
    """The code inside a botocore ClientError."""
    return str(error.response["Error"].get("Code", ""))


def is_missing(error: Any) -> bool:
    """Whether a ClientError says that the thing asked for does not exist.

    SageMaker has no code for it: it answers ValidationException with "Could not find ...".
    """
    code, text = code_of(error), str(error.response["Error"].get("Message", ""))
    return code in MISSING or (code == "ValidationException" and text.startswith("Could not find"))


def action(service: str, operation: str) -> str:
    """The IAM action that allows an operation."""
    return f"{ACTION_PREFIXES.get(service, service)}:{ACTIONS.get(operation, operation)}"


def explain(error: Any, service: str, operation: str, parameters: dict[str, Any]) -> DeployError:
    """A ClientError as a message that says what to do."""
    code, text = code_of(error), str(error.response["Error"].get("Message", ""))
    told = f"{action(service, operation)} failed: {code}: {text}"
    if code in DENIED:
        needed = action(service, operation)
        hint = f"the caller needs {needed}; `lorahost deploy role --print deployer` has the whole policy"
        return DeployError(f"{told}\n{hint}")
    if code in QUOTA:
        return DeployError(f"{told}\nthe account's quota is reached: ask for more in Service Quotas, or use less")
    if code in CREDENTIALS:
        return DeployError(f"{told}\nthe credentials are not valid (any more): sign in again")
    if code == "NoSuchBucket":
        bucket = parameters.get("Bucket", "")
        return DeployError(f"{told}\nthere is no bucket {bucket!r}; create it: aws s3 mb s3://{bucket}")
    return DeployError(told)
