# Everything runs in .venv, which the first target that needs it sets up. `rm -rf .venv` starts over.

# Any Python from 3.11 on that can make virtual environments; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	echo $$python; break; done)
# Test processes; each computes with one thread.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Python compiles what is imported, a fifth of the files, when it is first imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
# Each begins with a part of its own and takes over half of what another has left: most of what tests share is built once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Models and data come with the repository, all but a real model: see `real` below.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# The environment of whoever calls make stays outside.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# Each process, of which tests start many, would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup real demo bench docs licences test end-to-end test-both test-all test-versions check lint types imports format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F '|' '{ printf "make %-13s %s\n", $$1, $$2 }'

setup: $(INSTALLED) real  ## create .venv with everything in it; the other targets do so by themselves

# Once per user. Without a network, the demo runs on the embedded models, and the tests that need it are skipped.
real: $(INSTALLED)
	@$(BIN)/python tests/real_model.py

demo: real  ## speculative decoding beside plain decoding, on a real model
	@$(BIN)/python demos/demo.py

bench: $(INSTALLED)  ## one measurement: make bench NAME=queue ARGS="--limit 8"; without NAME, their list
	@$(BIN)/python -m benchmarks $(or $(NAME),--help) $(ARGS)

docs: $(INSTALLED)  ## the pages of docs/ as a site, in site/; broken links fail
	@$(BIN)/python docs/tools/parameters.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

licences: $(INSTALLED)  ## licences of what the extras `serve` and `ray` bring; copyleft ones first
	@$(BIN)/python docs/tools/licences.py serve ray

test: lint real  ## style and the tests
	@echo "== tests"
	@$(PYTEST) --durations 30

end-to-end: real  ## the quick start, the pages' examples, demos, benches and other packages, as users run them
	@echo "== from end to end"
	@$(PYTEST) -m end_to_end

# In one go, both import and collect once, and neither's last test leaves a worker alone.
test-both: lint real  ## the tests of `test` and of `end-to-end`
	@echo "== tests, those from end to end among them"
	@$(PYTEST) --durations 30 -m "end_to_end or not end_to_end"

test-all: check real  ## everything, with every combination of every option: long
	@echo "== all tests"
	@HF_SMARTSPEC_EXHAUSTIVE=1 $(PYTEST) --durations 30

test-versions: $(INSTALLED)  ## a part of them with every supported release of transformers; writes the table in README.md
	@$(BIN)/python tests/releases.py --workers $(WORKERS)

check: lint types imports  ## style, types and architecture

lint: $(INSTALLED)  ## style (ruff)
	@echo "== style"
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --output-format concise .

types: $(INSTALLED)  ## annotations (mypy)
	@echo "== types"
	@$(BIN)/mypy

imports: $(INSTALLED)  ## which module may import which (import-linter)
	@echo "== architecture"
	@$(BIN)/lint-imports --no-logo

format: $(INSTALLED)  ## put the code into this project's style
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:  ## remove build results and caches; .venv stays
	@rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A new pip: those that come with Python take most of a minute to choose among releases.
# torch alone and before the rest: nothing that follows may choose another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv was found: make PYTHON=/path/to/python3"; exit 1; }
	@test ! -x $(BIN)/python || $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(VENV) has $$($(BIN)/python --version); 3.11 or newer is needed: rm -rf $(VENV), then make setup"; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV) ($$($(PYTHON) --version))"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing $(TORCH)"
	@$(PIP) --upgrade pip
	@$(PIP) setuptools $(TORCH)
	@echo "== installing hf-smartspec and what its tests need"
	@PYTHONWARNINGS=ignore $(PIP) --no-build-isolation --config-settings editable_mode=compat --editable ".[test]"
	@touch $@
