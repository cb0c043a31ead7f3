# `make quickstart` and `make test` set up everything they need in .venv by themselves.
DEFAULT_PYTHON := python3
DEFAULT_TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.installed-test
SITE := $(VENV)/.installed-site
SETTINGS := $(VENV)/.settings
# what $(VENV) was made with: a choice holds until another is given
-include $(SETTINGS)
PYTHON ?= $(or $(CHOSEN_PYTHON),$(DEFAULT_PYTHON))
TORCH ?= $(or $(CHOSEN_TORCH),$(DEFAULT_TORCH))
# processes of `make test`
WORKERS ?= 2
# the order of tests/conftest.py: the files that take longest come first
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# trainings of every row of `make quickstart`
SEEDS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all versions lint format bench docs site api tables FORCE

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## make .venv with torch, fairseq and this package (TORCH=torch==... for another build)

ifneq ($(INSTALLED_PYTHON) $(INSTALLED_TORCH),$(PYTHON) $(TORCH))
$(INSTALLED): FORCE
endif

# the extra "experiments" renders the tables
$(INSTALLED): setup.py scripts/install.sh
	@rm -f $(INSTALLED) $(TOOLS) $(SITE) $(SETTINGS)
	@echo "installing $(TORCH), fairseq and this package in $(VENV): a few minutes"
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/install.sh '$(VENV)' experiments
	@printf '%s\n' 'INSTALLED_PYTHON := $(PYTHON)' 'INSTALLED_TORCH := $(TORCH)' \
	    'CHOSEN_PYTHON := $(filter-out $(DEFAULT_PYTHON),$(PYTHON))' \
	    'CHOSEN_TORCH := $(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),$(TORCH))' > $(SETTINGS)
	@touch $@

$(TOOLS): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-build-isolation --editable '.[plugin,experiments,hf,test]' > $(VENV)/install-test.log 2>&1 \
	    || { tail -n 40 $(VENV)/install-test.log; exit 1; }
	@touch $@

$(SITE): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-build-isolation --editable '.[plugin,experiments,hf,site]' > $(VENV)/install-site.log 2>&1 \
	    || { tail -n 40 $(VENV)/install-site.log; exit 1; }
	@touch $@

quickstart: install  ## train four small models on real text and compare them (SEEDS=3)
	$(BIN)/python -m lrpe_fairseq.experiments quickstart --seeds $(SEEDS)

test: $(TOOLS)  ## run the tests, end-to-end cases included
	$(PYTEST) -m 'not exhaustive'

test-all: $(TOOLS)  ## run every test, the exhaustive ones included
	$(PYTEST)

versions:  ## test other versions of torch and Python; hours
	scripts/test_versions.sh

lint: $(TOOLS)  ## check style, complexity, docstrings, imports and unused code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/vulture

format: $(TOOLS)  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## time attention and every encoding against their baselines
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.slot --minutes 120

docs: install  ## regenerate every generated page from the run files
	$(BIN)/python -m lrpe_fairseq.experiments.report.docs

site: $(SITE)  ## build the pages, the API and the explorer of the results as a site, build/site
	$(BIN)/python docs/site/make_site.py

api: install  ## write API pages of attention and encodings from the docstrings, build/api
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore pdoc
	$(BIN)/python -m pdoc --docformat google --output-directory build/api lrpe_fairseq.attention \
	    lrpe_fairseq.encodings
	@echo "open build/api/index.html"

tables: docs
