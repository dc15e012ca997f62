# Ropeway from a clean clone: `make demo` talks, `make test` and `make check` prove.  `make help` lists what there is.

# Debian's interpreter is built with profile-guided optimization and ran the gateway 4 to 19 % cheaper than a plain build.
PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
	&& echo /usr/bin/python3 || echo python3)
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
PACKAGES := ropeway.py cachecore policies gateway workers loadtest

# Several torch processes run side by side in the tests: one thread each, or they spin against each other.
OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults test-pools test-quality test-servers check format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.complete ## the environment in .venv (done once; again when pyproject.toml or constraints.txt change)

# torch comes first and pinned, so that nothing that follows draws in another build of it.
$(VENV)/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; name one with PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV). The first time takes minutes: torch is large."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,dev]'
	@touch $@

demo: setup ## fetch a small model, start two workers and the gateway, and say how to talk to them
	@$(BIN)/ropeway up

test: setup ## every test
	@$(BIN)/ropeway model fetch smollm2
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest

test-faults: setup ## several gateways under load while their Redis or Valkey misbehaves (a quarter of an hour)
	$(BIN)/python -m pytest -m faults tests/faults

test-servers: setup ## the mirror on Debian's Redis and on a cluster of three, too (some minutes)
	$(BIN)/python -m pytest -m servers tests/cachecore/index

test-quality: setup ## what repaired and quantized KV costs, on the real model (some minutes)
	@$(BIN)/ropeway model fetch smollm2
	$(BIN)/python -m pytest -m quality tests/workers/reference/test_quality.py

test-pools: setup ## the pools of KV: a directory, Redis values, S3 objects (some minutes)
	@$(BIN)/python -m pip install --quiet 'moto[server]'
	$(BIN)/python -m pytest -m pools tests/cachecore/store/pools

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
	rm -rf $(VENV) $(BENCH_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
