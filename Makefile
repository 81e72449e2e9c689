# Every target makes what it needs first. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help install setup demo test test-pure test-real test-quick test-all mutants coverage compose-test compose-test-all lint lock sbom audit

# The first of these that is Python 3.11 to 3.13 makes the virtual environment.
PYTHON ?= python3 python3.13 python3.12 python3.11

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.installed-for-users

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Where this is set, each of the hundreds of processes that tests start would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make install  make .venv with what it takes to use it'
	@echo 'make setup    make .venv with everything in it (the targets that test do it when it is missing)'
	@echo 'make demo     train two models on an embedded cluster while faults strike it'
	@echo '              JSON=FILE writes the report as data; CORPUS=DIR trains on other text'
	@echo 'make test     prove it: rules, formats, properties, storms, services on both buses, some real clusters;'
	@echo '              ARGS="-k name" goes to pytest (docs/testing.md lists what runs where, and why); its halves are'
	@echo '              make test-pure (what only computes) and make test-real (what starts processes)'
	@echo 'make test-quick   only what needs no process and no second: rules, formats, properties'
	@echo 'make test-all     everything there is: 2,000 storms, all real clusters, benchmarks, packages, the demo'
	@echo 'make coverage     all of make test, with the lines that no test reaches in its own process'
	@echo 'make compose-test   the same cluster in containers: build, train, kill a node, down'
	@echo 'make compose-test-all   besides, what `unicron init` writes for containers, and nodes that come by a pool or a token'
	@echo 'make mutants  plant mistakes in the code that decides, one at a time, and see which no test notices;'
	@echo '              ARGS="--seed 2 --count 40 --jobs 4 --json FILE" draws others'
	@echo 'make lint     check format, style, types and the rules of imports'
	@echo 'make lock     write deploy/lock anew: what the images are made of, with hashes, after a change of requirements'
	@echo 'make sbom     write into sbom/ what is in the images that were built, and under which licences'
	@echo 'make audit    ask the package index for known vulnerabilities of the versions in constraints.txt'
	@echo
	@echo 'PYTHON=/path/to/python3.11 chooses the interpreter for .venv'

install: $(or $(wildcard $(STAMP)),$(LIGHT))

setup: $(STAMP)

# Runs again only when a requirement or a version changed. pip would compile on one core; what fails to compile there are
# templates, which packages have under the names of modules.
$(LIGHT): WHAT := user
$(STAMP): WHAT := dev
$(LIGHT) $(STAMP): pyproject.toml constraints.txt
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
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[$(WHAT)]'
	@echo 'compiling the packages, on all cores'; $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@echo "compiling the planner's loops"; $(BIN)/python -c 'from unicron_planner.lookup import warm_up; warm_up()'
	@touch $@

demo: install
	$(BIN)/unicron demo $(if $(JSON),--json $(JSON)) $(if $(CORPUS),--corpus $(CORPUS))

# Tests that only compute take all cores first; then those that start processes, one real cluster a core.
PYTEST := $(BIN)/python -m pytest --dist loadgroup
PURE := $(PYTEST) -n auto
REAL := $(PYTEST) -n 2 tests/chaos tests/contract tests/integration tests/replay tests/unit/deploy
# Those again whose workers have groups, on a backend that treats them as NCCL does on GPUs.
STREAMS := $(PYTEST) -n 2 --on-streams $(addprefix tests/integration/train/test_,$(addsuffix .py,\
  checkpoints evaluating group inplace layouts libraries megatron randomness relayout retiring save spread training))

test: $(STAMP)
	@$(MAKE) --no-print-directory test-pure
	@$(MAKE) --no-print-directory test-real

test-pure: $(STAMP)
	$(PURE) -m 'not (compose or real or exhaustive)' $(ARGS)

test-real: $(STAMP)
	$(REAL) -m 'real and not (compose or exhaustive)' $(ARGS)

test-quick: $(STAMP)
	$(PURE) --ignore=tests/integration -m 'not (compose or real or exhaustive or slow)' $(ARGS)

test-all: $(STAMP)
	$(PURE) -m 'not (compose or real)' $(ARGS)
	$(REAL) -m 'real and not compose' $(ARGS)
	$(STREAMS) $(ARGS)

coverage: $(STAMP)
	$(PURE) -m 'not (compose or real or exhaustive)' --cov $(ARGS)
	$(REAL) -m 'real and not (compose or exhaustive)' --cov --cov-append --cov-report=term-missing:skip-covered $(ARGS)

compose-test: $(STAMP)
	$(BIN)/python -m pytest -m 'compose and not exhaustive' tests/e2e $(ARGS)

compose-test-all: $(STAMP)
	$(BIN)/python -m pytest -m compose tests/e2e $(ARGS)

docs/testing.md: $(STAMP) FORCE
	$(BIN)/python -m pytest --collect-only -qq --write-list >/dev/null

FORCE:

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What only these targets need is in an environment of its own.
TOOLS := .tools
TOOLS_STAMP := $(TOOLS)/.installed

$(TOOLS_STAMP): Makefile | $(STAMP)
	$(BIN)/python -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install cosmic-ray==8.7.0 uv==0.13.9 cyclonedx-bom==7.5.0 pip-licenses==5.5.5 pip-audit==2.10.1
	@touch $@

mutants: $(STAMP) $(TOOLS_STAMP)
	$(TOOLS)/bin/python -m tests.mutants $(ARGS)

# Resolved for macOS, where no torch has libraries of CUDA with it: which of those there are is the index's affair.
# The hashes are those of all platforms.
LOCK := MACOSX_DEPLOYMENT_TARGET=14.0 $(TOOLS)/bin/uv pip compile --quiet --system-certs --no-header --no-annotate \
  --generate-hashes --python-version 3.11 --python-platform aarch64-apple-darwin -c constraints.txt

lock: $(TOOLS_STAMP)
	@mkdir -p deploy/lock
	printf '%s\n' hatchling setuptools | $(LOCK) -o deploy/lock/build.txt -
	$(LOCK) --extra detector --extra docker --extra keys --extra metrics --extra notifier --extra otel --extra straggler --extra web -o deploy/lock/control.txt pyproject.toml
	$(LOCK) --extra metrics --extra planner -o deploy/lock/planner.txt pyproject.toml
	$(LOCK) --extra agent --extra metrics --extra train --no-emit-package torch -o deploy/lock/node.txt pyproject.toml

sbom: $(TOOLS_STAMP)
	$(TOOLS)/bin/python deploy/sbom.py sbom

audit: $(TOOLS_STAMP)
	@$(TOOLS)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt || { \
	  echo 'make audit: the versions in constraints.txt were not all found free of known vulnerabilities; where one is' >&2; \
	  echo '  "not found", the index that was asked knows of none at all, and nothing is said about any' >&2; exit 1; }
