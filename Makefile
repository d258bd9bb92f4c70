# `make help` lists what there is. Nothing is needed but Python 3.11 or newer, make and the package index;
# once installed, everything works offline. ARGS goes to the program: make test ARGS="-k parking -x"

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first Python that is new enough; another one with PYTHON=python3.13, which gets an environment of its own.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && exit; done; echo python3)
ifeq ($(filter command environment,$(firstword $(origin PYTHON))),)
VENV ?= .venv
else
VENV ?= .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
BIN := $(VENV)/bin
ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
CODE := relay tests

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environment ----------------------------------------------------------------------------------

.PHONY: install
install: $(VENV)/.dev ## Make the development environment (skipped when nothing changed)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON) is missing or older than Python 3.11; name a newer one: make $(MAKECMDGOALS) PYTHON=python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) comes without venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The hashes of the lock files are checked; the package itself is installed editable, without looking anything up.
$(VENV)/.demo: requirements/demo.lock pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements/demo.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# The development environment holds the demo's, with the same versions.
$(VENV)/.dev: requirements/dev.lock requirements/demo.lock pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements/dev.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(VENV)/.demo $@

# --- for newcomers --------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.demo ## Show the relay at work: PostgreSQL, Valkey and a small shop, for 20 seconds
	@$(BIN)/relay demo $(ARGS)

.PHONY: test
test: $(VENV)/.dev ## Run every test; starts its own servers, says loudly what is missing (see `services`)
	$(BIN)/python -m pytest $(ARGS)

# --- for developers -------------------------------------------------------------------------------

.PHONY: test-fast
test-fast: $(VENV)/.dev ## Run the tests that need no server
	$(BIN)/python -m pytest tests/unit tests/simulation $(ARGS)

.PHONY: check
check: $(VENV)/.dev ## Lint, format, types, layers, documents: what CI runs before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docs

.PHONY: format
format: $(VENV)/.dev ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.dev ## Measure against raw loops: make bench ARGS="drain --sink kafka --events 100000"
	$(BIN)/python -m tests.servers.bench $(ARGS)

.PHONY: services
services: $(VENV)/.dev ## Fetch the servers that the tests can use: apt (as root) and Maven
	$(BIN)/python -m tests.servers.install

# --- for maintainers ------------------------------------------------------------------------------

UV := $(shell command -v uv || echo $(VENV)/uv/bin/uv)
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header $(ARGS)

$(VENV)/uv/bin/uv: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/uv
	$(VENV)/uv/bin/python -m pip install --quiet uv

.PHONY: lock
lock: | $(UV) ## Choose versions anew and write requirements/*.lock: make lock ARGS=--upgrade
	$(COMPILE) pyproject.toml -o requirements/base.lock
	$(COMPILE) pyproject.toml requirements/build.in --extra demo -c requirements/base.lock -o requirements/demo.lock
	$(COMPILE) pyproject.toml requirements/build.in --extra demo --group dev -c requirements/demo.lock -o requirements/dev.lock

.PHONY: clean
clean: ## Remove everything that make has made, downloads included
	rm -rf .venv .venv-* .cache dist build bench-results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
