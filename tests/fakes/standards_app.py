"""SageMaker's contract as model-hosting-container-standards implements it, around a stub engine.

The decorators are wired as vLLM's own server wires them; the stub keeps names instead of weights. Run as
`python -m tests.fakes.standards_app PORT`.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import model_hosting_container_standards.sagemaker as sagemaker
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

BASE = "base"


def is_directory(path: str) -> bool:
    """Whether there is one."""
    return os.path.isdir(path)


def create_app() -> FastAPI:
    """The application; sessions follow `SAGEMAKER_ENABLE_STATEFUL_SESSIONS`."""
    app = FastAPI()
    adapters: dict[str, str] = {}

    @app.post("/ping")
    @app.get("/ping")
    @sagemaker.register_ping_handler
    async def ping(raw_request: Request) -> Response:
        return Response()

    @app.post("/invocations")
    @sagemaker.register_invocation_handler
    @sagemaker.stateful_session_manager()
    @sagemaker.inject_adapter_id(adapter_path="model")
    async def invocations(raw_request: Request) -> Response:
        body = await raw_request.json()
        # vLLM takes every false `model` for the base.
        model = body.get("model") or BASE
        if model != BASE and model not in adapters:
            raise HTTPException(404, f"The model `{model}` does not exist.")
        shell = {"id": "x", "created": 0, "model": model}
        if "messages" in body:
            choice = {"index": 0, "message": {"role": "assistant", "content": f"{model} "}, "finish_reason": "stop"}
            return JSONResponse({**shell, "object": "chat.completion", "choices": [choice]})
        if "prompt" in body:
            choice = {"index": 0, "text": f"{model} ", "finish_reason": "stop"}
            return JSONResponse({**shell, "object": "text_completion", "choices": [choice]})
        raise HTTPException(400, "Cannot find suitable handler for request.")

    @sagemaker.register_load_adapter_handler(request_shape={"name": "body.name", "src": "body.src"})
    async def load(request: SimpleNamespace, raw_request: Request) -> Response:
        if request.name in adapters:
            raise HTTPException(400, f"The lora adapter '{request.name}' has already been loaded.")
        if not is_directory(request.src):
            raise HTTPException(404, f"No adapter found for {request.src}")
        adapters[request.name] = request.src
        return Response("Success")

    @sagemaker.register_unload_adapter_handler(request_shape={"name": "path_params.adapter_name"})
    async def unload(request: SimpleNamespace, raw_request: Request) -> Response:
        if adapters.pop(request.name, None) is None:
            raise HTTPException(404, f"The lora adapter '{request.name}' cannot be found.")
        return Response("Success")

    return sagemaker.bootstrap(app)


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
