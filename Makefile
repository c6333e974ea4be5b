# `make` lists the targets. A target that needs the environment creates it first, once.

PYTHON ?= python3
VENV ?= .venv
# Text file or pattern such as 'corpus/*.txt' for the demo (default: the sources of Python's standard library).
DATA ?=
# Processes that run the tests, one test file at a time. Few, because many tests train or watch the machine's memory.
WORKERS ?= 2
# More arguments for pytest or the benchmarks, for example ARGS='-k order' and ARGS='--only demo'.
ARGS ?=

# Minutes during which `make endurance` disturbs its training.
MINUTES ?= 60

# Write bytecode even if the environment forbids it: the tests start hundreds of processes, each of which would compile
# the package again.
unexport PYTHONDONTWRITEBYTECODE

RUN = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed

.PHONY: help install test test-all demo lint site docs bench bench-all gpu picture endurance nightly rivals dist audit coverage mutants clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "  with PYTHON=$(PYTHON) VENV=$(VENV) DATA=$(DATA) WORKERS=$(WORKERS) ARGS=$(ARGS)"

install: $(INSTALLED) ## create the environment in VENV with the versions of constraints.txt

BASE = import os, sys; print(os.path.realpath(sys.base_prefix), *sys.version_info[:2])

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is not Python 3.11 or newer: choose a newer one, for example make install PYTHON=python3.12" >&2; \
	    exit 1; }
	@theirs=$$($(VENV)/bin/python -c '$(BASE)' 2>/dev/null); mine=$$($(PYTHON) -c '$(BASE)'); \
	    [ ! -d $(VENV) ] || [ "$$theirs" = "$$mine" ] || { \
	    echo "$(VENV) was made with another Python ($${theirs:-broken}) than $(PYTHON) ($$mine): remove it, or choose another VENV" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

test: install ## run the tests, without the long ones
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

ALL = -m 'not (gpu or browser or slow or nightly)'

test-all: install ## run all tests of continuous integration, including the long ones
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)

demo: install ## train inside a budget in which plain PyTorch runs out of memory
	$(RUN) benchmarks/demo.py $(if $(DATA),--data '$(DATA)')

lint: install ## check formatting, style and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

site: install ## build the documentation into site/ and check all links, without a network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(RUN) -m mkdocs build --strict

# The tests of README.md and the integrations run the programs there; the tests of the guides also run the sessions.
PAGES = tests/test_documentation.py tests/end_to_end/test_readme.py tests/end_to_end/test_guides.py \
    tests/end_to_end/test_integration_pages.py

docs: site ## build the documentation, and run the code on its pages
	$(RUN) -m pytest -n $(WORKERS) $(ALL) $(PAGES) $(ARGS)

RIVALS = $(patsubst benchmarks/rivals/%.txt,.rivals/%/.installed,$(wildcard benchmarks/rivals/*.txt))

rivals: $(RIVALS) ## install other tools for comparison, each in an environment below .rivals

.rivals/%/.installed: benchmarks/rivals/%.txt
	$(PYTHON) -m venv .rivals/$*
	.rivals/$*/bin/python -m pip install --quiet -r $<
	@touch $@

bench: install ## run the benchmarks that fit into 30 minutes, file their results and update the tables on pages
	$(RUN) benchmarks/bench.py $(ARGS)

bench-all: install ## run every benchmark, which takes hours; for real text use ARGS='--news agnews-test.csv --text wikitext2-valid.txt'
	$(RUN) benchmarks/bench.py --all $(ARGS)

gpu: ## run the GPU checks in 12 minutes, with the interpreter PYTHON as it is; ARGS='--minutes 7' or ARGS=--resume
	@PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu $(ARGS)

picture: install ## update the report picture in README.md; needs Chromium
	$(RUN) benchmarks/picture.py

endurance: install ## train for an hour (MINUTES) under a tight budget, with constant disturbances
	$(RUN) benchmarks/endurance.py --minutes $(MINUTES) $(if $(DATA),--data '$(DATA)')

nightly: install ## run the tests that take ten minutes or more
	$(RUN) -m pytest -m nightly $(ARGS)

$(VENV)/.installed-release: $(INSTALLED)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs,release]'
	@touch $@

coverage: $(VENV)/.installed-release ## report the lines that the tests run, also in processes that they start
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

# Modules or folders for `make mutants`, the number of mutants of each, and the random seed.
MUTATED ?= src/plimsoll/step/undo/step_state.py src/plimsoll/step/update/commit.py
NUMBER ?= 20
SEED ?= 0

mutants: $(VENV)/.installed-release ## check that tests detect small changes: NUMBER per module in MUTATED, drawn with SEED
	$(RUN) tests/mutants.py $(MUTATED) --number $(NUMBER) --seed $(SEED) --workers $(WORKERS)

dist: $(VENV)/.installed-release ## build the wheel and the source archive into dist/, and test them
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m pytest tests/test_distribution.py -m 'slow or not slow'

audit: $(VENV)/.installed-release ## check licences and known vulnerabilities of installed packages; the latter needs a network
	$(RUN) -m pip check
	$(RUN) tests/licences.py
	$(RUN) -m pip_audit --strict --requirement constraints.txt --no-deps --disable-pip

clean: ## remove builds and caches; runs and VENV stay
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
