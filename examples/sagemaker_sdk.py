"""An endpoint with two adapters by the SageMaker Python SDK v3: its resource layer, `sagemaker-core`.

    python examples/sagemaker_sdk.py --image IMAGE --role ROLE_ARN --store s3://bucket/prefix

deploys the demo's model as the base inference component and two of its adapters as adapter inference components, asks
all three the same question, streams one answer, and tears everything down. Region, credentials and AWS_ENDPOINT_URL
are boto3's, so the same lines talk to AWS and to `lorahost local-aws`. docs/deploy.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.exceptions import ClientError
from sagemaker.core import shapes
from sagemaker.core.resources import Endpoint, EndpointConfig, InferenceComponent, Model

from lorahost_deploy import artifact
from lorahost_deploy.plan import AMI_OF_CUDA, VARIANT, S3Place

DEMO = Path(__file__).resolve().parent / "demo"
ADAPTERS = ("pirate", "poet")
QUESTION = "Tell me about the sea."
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Site:
    """Where everything goes.

    Attributes:
        endpoint: Name of the endpoint; model, configuration and base component are named after it.
        image: The container image in ECR.
        role: ARN of the execution role, as `lorahost deploy role` makes it.
        store: Bucket and prefix; model and adapters go into a folder there, named like the endpoint.
        poll_s: Whole seconds between two looks while waiting.
    """

    session: boto3.Session
    endpoint: str
    image: str
    role: str
    store: S3Place
    instance_type: str = "ml.g6e.2xlarge"
    memory_mb: int = 16384
    poll_s: int = 15

    @property
    def base(self) -> str:
        """Name of the base inference component."""
        return f"{self.endpoint}-base"


def upload(site: Site, path: Path, *parts: str) -> str:
    """Uploads one file; returns its address."""
    site.session.client("s3").upload_file(str(path), site.store.bucket, site.store.key(site.endpoint, *parts))
    return site.store.url(site.endpoint, *parts)


def upload_model(site: Site, folder: Path) -> str:
    """Uploads a model's files; returns their prefix."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        upload(site, path, "model", path.relative_to(folder).as_posix())
    return site.store.url(site.endpoint, "model") + "/"


def create_config(site: Site) -> EndpointConfig:
    """The instances, without a model: inference components bring theirs."""
    variant = shapes.ProductionVariant(
        variant_name=VARIANT,
        instance_type=site.instance_type,
        initial_instance_count=1,
        inference_ami_version=AMI_OF_CUDA["13.0"],
        container_startup_health_check_timeout_in_seconds=1800,
        managed_instance_scaling=shapes.ProductionVariantManagedInstanceScaling(
            status="ENABLED", min_instance_count=1, max_instance_count=1
        ),
        routing_config=shapes.ProductionVariantRoutingConfig(routing_strategy="LEAST_OUTSTANDING_REQUESTS"),
    )
    return EndpointConfig.create(
        endpoint_config_name=site.endpoint,
        production_variants=[variant],
        execution_role_arn=site.role,
        enable_network_isolation=True,
        session=site.session,
    )


def create_endpoint(site: Site) -> Endpoint:
    """An endpoint of that configuration."""
    endpoint = Endpoint.create(endpoint_name=site.endpoint, endpoint_config_name=site.endpoint, session=site.session)
    endpoint.wait_for_status("InService", poll=site.poll_s, timeout=TIMEOUT_S)
    return endpoint


def create_base(site: Site, model_url: str, environment: dict[str, str]) -> InferenceComponent:
    """The base model: one copy on one accelerator."""
    source = shapes.S3ModelDataSource(s3_uri=model_url, s3_data_type="S3Prefix", compression_type="None")
    Model.create(
        model_name=site.endpoint,
        primary_container=shapes.ContainerDefinition(
            image=site.image,
            model_data_source=shapes.ModelDataSource(s3_data_source=source),
            environment=environment,
        ),
        execution_role_arn=site.role,
        enable_network_isolation=True,
        session=site.session,
    )
    component = InferenceComponent.create(
        inference_component_name=site.base,
        endpoint_name=site.endpoint,
        variant_name=VARIANT,
        specification=shapes.InferenceComponentSpecification(
            model_name=site.endpoint,
            compute_resource_requirements=shapes.InferenceComponentComputeResourceRequirements(
                number_of_accelerator_devices_required=1, min_memory_required_in_mb=site.memory_mb
            ),
            startup_parameters=shapes.InferenceComponentStartupParameters(
                container_startup_health_check_timeout_in_seconds=1800
            ),
        ),
        runtime_config=shapes.InferenceComponentRuntimeConfig(copy_count=1),
        session=site.session,
    )
    component.wait_for_status("InService", poll=site.poll_s, timeout=TIMEOUT_S)
    return component


def add_adapter(site: Site, name: str, folder: Path, model: Path) -> InferenceComponent:
    """One adapter on the base component: it shares the base's resources and copies, so it names none.

    The server's own importer checks the adapter before anything is uploaded.
    """
    adapter = artifact.check(name, folder, model, max_rank=32)
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / f"{name}.tar.gz"
        artifact.pack(adapter, packed)
        url = upload(site, packed, "adapters", name, f"{adapter.digest}.tar.gz")
    component = InferenceComponent.create(
        inference_component_name=name,
        endpoint_name=site.endpoint,
        specification=shapes.InferenceComponentSpecification(
            base_inference_component_name=site.base,
            container=shapes.InferenceComponentContainerSpecification(artifact_url=url),
        ),
        session=site.session,
    )
    component.wait_for_status("InService", poll=site.poll_s, timeout=TIMEOUT_S)
    return component


def chat(question: str, **fields: object) -> bytes:
    """A request's body."""
    return json.dumps({"messages": [{"role": "user", "content": question}], "max_tokens": 60, **fields}).encode()


def ask(endpoint: Endpoint, component: str, question: str) -> tuple[str, str]:
    """One answer, and who gave it: `adapter=<name>;version=<digest>`."""
    answer = endpoint.invoke(body=chat(question), content_type="application/json", inference_component_name=component)
    return json.loads(answer.body.read())["choices"][0]["message"]["content"], answer.custom_attributes


def stream(site: Site, component: str, question: str) -> Iterator[str]:
    """The pieces of one answer as they come; SageMaker cuts the stream anywhere, also inside of an event.

    By boto3 itself: `Endpoint.invoke_with_response_stream` of sagemaker-core 2.27.0 fails on every event stream.

    Raises:
        RuntimeError: the server ended the stream with an error.
    """
    answer = site.session.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName=site.endpoint,
        InferenceComponentName=component,
        ContentType="application/json",
        Body=chat(question, stream=True),
    )
    held = b""
    for part in answer["Body"]:
        *events, held = (held + part["PayloadPart"]["Bytes"]).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield from (choice["delta"].get("content") or "" for choice in chunk["choices"])


def tear_down(site: Site) -> None:
    """Removes what is there, adapters before their base, and the endpoint's folder in the store."""
    session = site.session
    components = list(InferenceComponent.get_all(endpoint_name_equals=site.endpoint, session=session))
    for component in sorted(components, key=lambda one: one.inference_component_name == site.base):
        component.delete()
        component.wait_for_delete(poll=site.poll_s, timeout=TIMEOUT_S)
    for find in (
        lambda: Endpoint.get(endpoint_name=site.endpoint, session=session),
        lambda: EndpointConfig.get(endpoint_config_name=site.endpoint, session=session),
        lambda: Model.get(model_name=site.endpoint, session=session),
    ):
        try:
            found = find()
        except ClientError as error:
            if "Could not find" not in str(error):
                raise
            continue
        found.delete()
        if isinstance(found, Endpoint):
            found.wait_for_delete(poll=site.poll_s, timeout=TIMEOUT_S)
    bucket = session.resource("s3").Bucket(site.store.bucket)
    bucket.objects.filter(Prefix=site.store.key(site.endpoint) + "/").delete()


def main() -> None:
    """Deploys, asks, streams, tears down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", required=True)
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--store", required=True, help="s3://bucket/prefix for the uploads")
    parser.add_argument("--endpoint", default="lorahost-sdk")
    parser.add_argument("--instance-type", default=Site.instance_type)
    parser.add_argument("--poll", type=int, default=Site.poll_s, help="seconds between two looks while waiting")
    options = parser.parse_args()
    # boto3 itself reads AWS_DEFAULT_REGION and the profile only
    session = boto3.Session(region_name=os.environ.get("AWS_REGION"))
    site = Site(
        session,
        options.endpoint,
        options.image,
        options.role,
        S3Place.parse(options.store),
        instance_type=options.instance_type,
        poll_s=options.poll,
    )
    # a name that is taken fails here, before anything is there to be torn down
    create_config(site)
    try:
        endpoint = create_endpoint(site)
        create_base(site, upload_model(site, DEMO / "model"), {"SM_VLLM_MAX_LORA_RANK": "32"})
        for name in ADAPTERS:
            add_adapter(site, name, DEMO / "adapters" / name, DEMO / "model")
        print(QUESTION)
        for component in (site.base, *ADAPTERS):
            print(component, *ask(endpoint, component, QUESTION), sep=" | ")
        print("stream", "".join(stream(site, ADAPTERS[0], QUESTION)), sep=" | ")
    finally:
        tear_down(site)
    print("everything is removed")


if __name__ == "__main__":
    main()
