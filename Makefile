# make demo    set up what the demo needs, then run eight jobs of four tenants
# make test    set up the development tools, then run the tests
# make check   format, lint, types and import rules
# make setup   only set up for development
#
# PYTHON       the interpreter to build the environment with, 3.11 or newer
# PIP_ARGS     more arguments for pip, e.g. another index for a CPU build of torch
# PYTEST_ARGS  more arguments for pytest, e.g. "-m 'not slow' -k jobspec"

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_OUT ?= runs/demo

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	--constraint constraints.txt $(PIP_ARGS)

# OpenMP threads that spin while they wait take the cores away from the other workers.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test check setup
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8

demo: $(VENV)/installed
	@if [ -e $(DEMO_OUT)/run.json ]; then \
		echo "$(DEMO_OUT) exists: going on where it was (remove the folder to start anew)"; \
		$(BIN)/marlaas run --resume $(DEMO_OUT); \
	else \
		$(BIN)/marlaas run examples/demo.yaml --out $(DEMO_OUT); \
	fi

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check marlaas tests
	$(BIN)/ruff check marlaas tests
	$(BIN)/lint-imports
	$(BIN)/pyright

setup: $(VENV)/installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/newer/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than the files that decide what is installed, so nothing is installed twice.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing MARLaaS into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing the development tools into $(VENV)"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
