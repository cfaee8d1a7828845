# make setup | test | lint | demo | clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dspark-setup
# The first Python that is new enough; override with `make setup PYTHON=/path/to/python`.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
# Tests run one process a core and one thread a process.
TEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal

.PHONY: help setup test lint format demo clean

help:
	@echo 'make setup   build $(VENV) with everything pinned in constraints.txt'
	@echo 'make demo    real prompts answered by the target alone and with DSpark, side by side'
	@echo 'make test    all tests'
	@echo 'make lint    ruff, mypy and the import contract'
	@echo 'make format  let ruff fix what it can'
	@echo 'make clean   remove $(VENV) and every cache'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z '$(PYTHON)' ]; then echo 'dspark needs Python 3.11 or newer; none was found (make setup PYTHON=/path/to/python)' >&2; exit 1; fi
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	touch $@

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	$(BIN)/dspark demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
