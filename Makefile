# `make` lists what there is. Every target that needs the environment makes it first, once.

PYTHON ?= python3
VENV ?= .venv
# A text file or a pattern such as 'corpus/*.txt' for the demo; empty: the sources of Python's standard library.
DATA ?=
# Processes that run the tests, a file of tests at a time. Few: many tests train, or watch the machine's memory.
WORKERS ?= 2
# Further arguments of pytest or of the benchmarks, for example ARGS='-k order' and ARGS='--only demo'.
ARGS ?=

# How long `make endurance` disturbs its training.
MINUTES ?= 60

# Also where the environment forbids it: the tests start hundreds of processes that would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

RUN = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed

.PHONY: help install test test-all demo lint site docs bench bench-all gpu picture endurance nightly rivals dist audit coverage mutants clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "  with PYTHON=$(PYTHON) VENV=$(VENV) DATA=$(DATA) WORKERS=$(WORKERS) ARGS=$(ARGS)"

install: $(INSTALLED) ## make the environment in VENV with the versions of constraints.txt

BASE = import os, sys; print(os.path.realpath(sys.base_prefix), *sys.version_info[:2])

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is not Python 3.11 or newer: give one that is, for example make install PYTHON=python3.12" >&2; \
	    exit 1; }
	@theirs=$$($(VENV)/bin/python -c '$(BASE)' 2>/dev/null); mine=$$($(PYTHON) -c '$(BASE)'); \
	    [ ! -d $(VENV) ] || [ "$$theirs" = "$$mine" ] || { \
	    echo "$(VENV) is of another Python ($${theirs:-broken}) than $(PYTHON) ($$mine): remove it, or give another VENV" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

test: install ## run the tests but for those that take long
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

ALL = -m 'not (gpu or browser or slow or nightly)'

test-all: install ## run those that take longer, too, as continuous integration does
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)

demo: install ## train inside a budget that plain PyTorch does not survive
	$(RUN) benchmarks/demo.py $(if $(DATA),--data '$(DATA)')

lint: install ## check formatting, style and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

site: install ## build the documentation into site/: it checks all links, and fetches nothing from a network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(RUN) -m mkdocs build --strict

# The tests of README.md and the integrations run their programs, and those of the guides their sessions, too.
PAGES = tests/test_documentation.py tests/end_to_end/test_readme.py tests/end_to_end/test_guides.py \
    tests/end_to_end/test_integration_pages.py

docs: site ## build the documentation, and run the code on its pages
	$(RUN) -m pytest -n $(WORKERS) $(ALL) $(PAGES) $(ARGS)

RIVALS = $(patsubst benchmarks/rivals/%.txt,.rivals/%/.installed,$(wildcard benchmarks/rivals/*.txt))

rivals: $(RIVALS) ## install other tools to compare with, in environments of their own below .rivals

.rivals/%/.installed: benchmarks/rivals/%.txt
	$(PYTHON) -m venv .rivals/$*
	.rivals/$*/bin/python -m pip install --quiet -r $<
	@touch $@

bench: install ## run the benchmarks that fit into 30 minutes, file their results and rewrite the tables that pages show
	$(RUN) benchmarks/bench.py $(ARGS)

bench-all: install ## run every benchmark, for hours; real text with ARGS='--news agnews-test.csv --text wikitext2-valid.txt'
	$(RUN) benchmarks/bench.py --all $(ARGS)

gpu: ## what only a GPU can show, in 12 minutes, with the interpreter PYTHON as it is; ARGS='--minutes 7' or ARGS=--resume
	@PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu $(ARGS)

picture: install ## make the picture of a report in README.md anew, where there is Chromium
	$(RUN) benchmarks/picture.py

endurance: install ## an hour (MINUTES) of training under a tight budget with everything that can go wrong
	$(RUN) benchmarks/endurance.py --minutes $(MINUTES) $(if $(DATA),--data '$(DATA)')

nightly: install ## the tests that take ten minutes and more
	$(RUN) -m pytest -m nightly $(ARGS)

$(VENV)/.installed-release: $(INSTALLED)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs,release]'
	@touch $@

coverage: $(VENV)/.installed-release ## which lines the tests run, also in processes that they start
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

# Modules or folders of them for `make mutants`, how many mutants of each, and what they are drawn with.
MUTATED ?= src/plimsoll/step/undo/step_state.py src/plimsoll/step/update/commit.py
NUMBER ?= 20
SEED ?= 0

mutants: $(VENV)/.installed-release ## whether tests notice small changes: NUMBER of each module in MUTATED, drawn with SEED
	$(RUN) tests/mutants.py $(MUTATED) --number $(NUMBER) --seed $(SEED) --workers $(WORKERS)

dist: $(VENV)/.installed-release ## build the wheel and the source archive into dist/, and try them
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m pytest tests/test_distribution.py -m 'slow or not slow'

audit: $(VENV)/.installed-release ## licences and known vulnerabilities of what is installed; the latter need a network
	$(RUN) -m pip check
	$(RUN) tests/licences.py
	$(RUN) -m pip_audit --strict --requirement constraints.txt --no-deps --disable-pip

clean: ## remove builds and caches; runs and VENV stay
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
