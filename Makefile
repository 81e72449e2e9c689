# Every target makes what it needs first. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick coverage compose-test lint

# The first of these that is Python 3.11 to 3.13 makes the virtual environment.
PYTHON ?= python3 python3.13 python3.12 python3.11

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

help:
	@echo 'make setup    make .venv with everything in it (the other targets do it when it is missing)'
	@echo 'make demo     train two models on an embedded cluster while faults strike it'
	@echo '              JSON=FILE writes the report as data; CORPUS=DIR trains on other text'
	@echo 'make test     run all tests but the compose test, in parallel; ARGS="-k name" goes to pytest'
	@echo 'make test-quick   the same without those marked slow: all rules and formats, and some real processes'
	@echo 'make coverage     all of make test, with the lines that no test reaches in its own process'
	@echo 'make compose-test   the same cluster in containers: build, train, kill a node, down'
	@echo 'make lint     check format, style, types and the rules of imports'
	@echo
	@echo 'PYTHON=/path/to/python3.11 chooses the interpreter for .venv'

setup: $(STAMP)

# Runs again only when a requirement or a version changed.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c '' 2>/dev/null && exit 0; \
	for python in $(PYTHON); do \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue; \
	  echo "making $(VENV) with $$("$$python" -V)"; \
	  "$$python" -m venv $(VENV) && exit 0; \
	  echo "make: $$python can't make a virtual environment; install its venv module (on Debian: python3-venv)" >&2; \
	  rm -rf $(VENV); exit 1; \
	done; \
	echo 'make: Unicron needs Python 3.11, 3.12 or 3.13, and none of these is one: $(PYTHON)' >&2; \
	echo '      install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11' >&2; \
	exit 1
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@echo "compiling the planner's loops"; $(BIN)/python -c 'from unicron_planner.lookup import warm_up; warm_up()'
	@touch $@

demo: $(STAMP)
	$(BIN)/unicron demo $(if $(JSON),--json $(JSON)) $(if $(CORPUS),--corpus $(CORPUS))

# Most tests wait for processes: there are more workers than cores. A module with a cluster of its own stays together.
PARALLEL := -n auto --dist loadgroup

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not compose' $(ARGS)

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not compose and not slow' $(ARGS)

coverage: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not compose' --cov --cov-report=term-missing:skip-covered $(ARGS)

compose-test: $(STAMP)
	$(BIN)/python -m pytest -m compose tests/e2e/test_compose.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
