"""A merged model's way into Bedrock: upload, import job, invocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lorahost_deploy import console, store, waiting
from lorahost_deploy.aws import Aws
from lorahost_deploy.compare import named
from lorahost_deploy.errors import DeployError
from lorahost_deploy.invoke import whole_text
from lorahost_deploy.plan import Plan

# Families of Bedrock's list that adapters can be merged into; its T5, GPTBigCode and vision models are not served here.
ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "GptOssForCausalLM",
    }
)
IMPORT_S = 4 * 3600.0
ATTEMPTS = 5


def check_folder(folder: Path) -> None:
    """Raises DeployError when Bedrock would not take the model in `folder`."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise DeployError(f"{folder} holds an adapter only: merge it first, `lorahost deploy bedrock merge`")
        raise DeployError(f"{folder} holds no model: no config.json")
    config = json.loads((folder / "config.json").read_text())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise DeployError(f"{folder}: Bedrock imports no {architecture}; of what is served here it imports {known}")
    if not list(folder.glob("*.safetensors")):
        raise DeployError(f"{folder}: no safetensors in it; Bedrock imports no other weights")
    if not list(folder.glob("tokenizer*")):
        raise DeployError(f"{folder}: no tokenizer in it")


def import_model(aws: Aws, name: str, folder: Path, store_url: str, role_arn: str) -> None:
    """Uploads the model and imports it as `name`; what is so already stays.

    Raises:
        DeployError: Bedrock would not take it, the job failed, or `name` has other weights.
    """
    check_folder(folder)
    source = store.model_url(aws, Plan(endpoint="bedrock", model=str(folder), store=store_url))
    found = aws.find("bedrock", "GetImportedModel", modelIdentifier=name)
    if found is not None:
        there = found["modelDataSource"]["s3DataSource"]["s3Uri"]
        if there != source:
            raise DeployError(f"model {name} was imported from {there}: remove it first, or take another name")
        console.say(f"model {name}: imported already, {found['modelArn']}")
        return
    request = {
        "importedModelName": name,
        "roleArn": role_arn,
        "modelDataSource": {"s3DataSource": {"s3Uri": source}},
    }
    _wait(aws, _job(aws, name, request), name)


def _job(aws: Aws, name: str, request: dict[str, Any]) -> str:
    """The job of this request: one that runs already, or a new one; a failed one's name can't be used again."""
    for attempt in range(ATTEMPTS):
        job = named(name[:50], {**request, "attempt": attempt})
        found = aws.find("bedrock", "GetModelImportJob", jobIdentifier=job)
        if found is None:
            aws.change("bedrock", "CreateModelImportJob", {"jobName": job, **request})
            return job
        if found["status"] == "InProgress":
            return job
    raise DeployError(f"model {name}: {ATTEMPTS} import jobs of it have ended without a model; look at them in Bedrock")


def _wait(aws: Aws, job: str, name: str) -> None:
    if aws.dry_run:
        return

    def look() -> dict[str, Any] | None:
        found = aws.find("bedrock", "GetModelImportJob", jobIdentifier=job)
        return (
            None
            if found is None
            else {
                "status": "Creating" if found["status"] == "InProgress" else found["status"],
                **{key: found[key] for key in ("failureMessage", "importedModelArn") if key in found},
            }
        )

    found = waiting.settled(aws, look, "status", f"import of {name}", IMPORT_S)
    if found is None or found["status"] != "Completed":
        reason = (found or {}).get("failureMessage") or "Bedrock gave no reason"
        raise DeployError(f"import job {job} is {(found or {}).get('status', 'gone')}: {reason}")
    console.say(f"model {name}: imported, {found.get('importedModelArn', '')}")


def invoke(aws: Aws, name: str, prompt: str, max_tokens: int, tries: int = 20) -> str:
    """Asks an imported model; one that was idle is loaded first, which takes minutes.

    Raises:
        DeployError: it does not exist, or is not ready after `tries` looks.
    """
    model = aws.read("bedrock", "GetImportedModel", modelIdentifier=name)
    message = {"role": "user", "content": prompt}
    body = json.dumps({"messages": [message], "max_tokens": max_tokens})
    request = {"modelId": model["modelArn"], "body": body if aws.dry_run else body.encode()}
    if aws.dry_run:
        aws.change("bedrock-runtime", "InvokeModel", request)
        return ""
    with console.waiting(f"model {name}") as show:
        for _ in range(tries):
            try:
                answer = aws.change("bedrock-runtime", "InvokeModel", request)
                return whole_text(answer["body"].read())
            except DeployError as error:
                if "ModelNotReadyException" not in error.message:
                    raise
            show("is being loaded")
            aws.sleep()
    raise DeployError(f"model {name} is not ready after {tries} tries; ask again later")


def remove(aws: Aws, name: str) -> None:
    """Deletes an imported model; what is gone already is fine. The upload stays."""
    if aws.find("bedrock", "GetImportedModel", modelIdentifier=name) is not None:
        aws.remove("bedrock", "DeleteImportedModel", modelIdentifier=name)
        console.say(f"model {name}: deleted")
