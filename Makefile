# Everything a checkout needs: `make demo`, `make test`. The environment is .venv and stays there.
#   make demo PYTHON=python3.12     another interpreter (before the first run, or after make clean)
#   make demo CUDA=12               CuPy for CUDA 12 drivers; chosen by itself where nvidia-smi is
#   make test ARGS="-k cache -x"    more for pytest

PYTHON ?= python3
CUDA ?= $(or $(shell nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA Version: *([0-9]+).*/\1/p'),13)
ARGS ?=
# Of 2 cores: one more, since many a test waits for a process that it has started. Each worker takes
# 20 s to import and collect everything.
JOBS ?= 3

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
NEWEST := 13.5.37# NVRTC, beside the one of tests/constraints.txt: tests/jit/test_newest_nvrtc.py
EXTRA := $(if $(filter 12,$(CUDA)),cuda12,cuda13)
INPUTS := pyproject.toml tests/constraints.txt
# One line a downloaded or installed package, errors in full. Of 8,000 files few are ever imported.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile \
	-c tests/constraints.txt -e
SHOW := { grep --line-buffered -E '^ *(Downloading|Using cached|ERROR)' \
	| sed -uE 's/-[a-z0-9]+-[a-z0-9_]+-[a-z0-9_.]+\.whl/ /; s/^ */  /' || true; }

# Tests start hundreds of processes that import torch and CuPy: 5 s each without bytecode, 2 s with.
KEEP_BYTECODE = env -u PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-gpu check format docs clean

help:  ## these lines
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "  make %-9s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo  ## attention on real input, GPU or CPU, checked against float64
	@$(BIN)/fkjit demo $(ARGS)

test: $(VENV)/.test  ## every test that needs no GPU
	@$(KEEP_BYTECODE) $(BIN)/python -m pytest -q -n $(JOBS) $(ARGS)

test-gpu: $(VENV)/.test  ## the tests that need one
	@$(BIN)/python -m pytest -q -m gpu $(ARGS)

check: $(VENV)/.check  ## ruff, pyright, clang-format, hadolint
	@$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/hadolint docs/container/Dockerfile
	find kernels_cu templates -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.check  ## let ruff and clang-format write
	@$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	find kernels_cu templates -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

docs: $(VENV)/.test  ## the site of the documents, in docs/_build; a warning is an error
	@$(BIN)/sphinx-build -q -n -W --keep-going -c docs . docs/_build $(ARGS)
	echo "docs/_build/index.html"

clean:  ## remove the environment and what tools left behind
	@rm -rf $(VENV) dist build docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@command -v $(PYTHON) > /dev/null || { echo "make: no $(PYTHON) here: PYTHON=python3.x names \
	another one (3.10 or newer)"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: fkjit needs \
	Python 3.10 or newer; $$($(PYTHON) --version) is $(PYTHON): PYTHON=python3.x names another"; exit 1; }
	$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { echo "make: $(PYTHON) has no venv: \
	apt-get install python3-venv (or what your distribution calls it)"; exit 1; }
	echo "making $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.python $(INPUTS)
	@echo "installing fkjit with CuPy and NVRTC for CUDA $(subst cuda,,$(EXTRA)) (once, about 200 MB)"
	$(INSTALL) '.[$(EXTRA)]' | $(SHOW)
	touch $@

$(VENV)/.test: $(VENV)/.python $(INPUTS)
	@echo "installing fkjit, CuPy, NVRTC, pytest, torch and triton (once; the last two are most of it)"
	$(INSTALL) '.[$(EXTRA),sass,test,twins,docs]' | $(SHOW)
	if [ $(EXTRA) = cuda13 ]; then $(BIN)/python -m pip install --disable-pip-version-check \
	--progress-bar off --no-compile --no-deps --upgrade --target $(VENV)/nvrtc-newest \
	nvidia-cuda-nvrtc==$(NEWEST) | $(SHOW); fi
	touch $(VENV)/.demo $@

$(VENV)/.check: $(VENV)/.test
	@$(INSTALL) '.[dev]' | $(SHOW)
	touch $@
