# `make quickstart` and `make test` set up everything they need in .venv by themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# processes of `make test`
WORKERS ?= 2
# trainings of every row of `make quickstart`
SEEDS ?= 1
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format bench tables

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## make .venv with torch, fairseq and this package (TORCH=torch==... for another build)

# fairseq's build asks for a torch of its own; without isolation it uses the one just installed
$(INSTALLED): setup.py
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or 3.12 is needed: make PYTHON=python3.11") if sys.version_info[:2] not in [(3, 11), (3, 12)] else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet numpy cython
	$(BIN)/python -m pip install --quiet --no-build-isolation fairseq-fixed==0.12.3.1
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test,plots]'
	touch $@

quickstart: install  ## train LRPE beside its baselines on real text; prints one table (SEEDS=3)
	$(BIN)/python -m lrpe_fairseq.experiments.commands.quickstart --seeds $(SEEDS)

test: install  ## prove that it is right, end-to-end cases included
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: install  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## time attention and every encoding against their baselines
	$(BIN)/python -m benchmarks.run

tables: install  ## render results/README.md and docs/cost.md from the run files
	$(BIN)/python -m lrpe_fairseq.experiments.report.tables
	$(BIN)/python -m lrpe_fairseq.experiments.report.cost
