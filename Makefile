# make demo    from nothing to the answers of a base model and its adapters on this machine's CPU (PORT=8080, ONESHOT=1 to stop after them)
# make demo-aws   the life of an endpoint against a local stand-in of AWS (ENGINE=fake without a model)
# make deploy-venv   .venv-deploy for `lorahost deploy`, without torch and vLLM
# make image-test   builds and tries the container image with buildah and podman (BASE=an image, instead of one made from Debian)
# make test    lint, types and all tests, the real CPU engine included
SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
PORT  ?= 8080
ENGINE ?= vllm
UV    := uv==0.13.9
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: demo demo-aws deploy-venv test check format lock bench-front image-test clean

demo: $(VENV)/.runtime
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo/run.py --port $(PORT) $(if $(ONESHOT),--oneshot)

demo-aws: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/aws_demo.py --engine $(ENGINE)

deploy-venv: $(VENV)-deploy/.ready

test: check deploy-venv
	$(BIN)/pytest tests/unit tests/kernels -n 2
	$(BIN)/pytest tests/contract tests/property tests/deploy
	$(BIN)/pytest tests/engine

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-front: $(VENV)/.dev
	$(BIN)/python -m bench.front

image-test:
	$(or $(PYTHON),python3) container/image_test.py $(if $(BASE),--base $(BASE))

lock: $(VENV)/.uv
	PATH="$(CURDIR)/$(BIN):$$PATH" requirements/lock.sh --upgrade

# The locks are complete: see requirements/README.md for --no-deps.
$(VENV)/.uv:
	@test -n "$(PYTHON)" || { echo "lorahost needs Python 3.11 or 3.12 (set PYTHON=)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(UV)"
	@touch $@

$(VENV)/.runtime: $(VENV)/.uv requirements/cpu.lock pyproject.toml
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements/cpu.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements/dev.lock
	@touch $@

$(VENV)-deploy/.ready: $(VENV)/.uv requirements/deploy.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)-deploy
	$(BIN)/uv pip install -q --python $(VENV)-deploy/bin/python --no-deps --require-hashes -r requirements/deploy.lock
	$(BIN)/uv pip install -q --python $(VENV)-deploy/bin/python --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-deploy .pytest_cache .mypy_cache .ruff_cache .hypothesis
