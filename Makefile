# `make` lists the targets. A target that needs the environment creates it on its first run.

PYTHON ?= python3
VENV ?= .venv
# Text for the demo: a file, or a pattern such as 'corpus/*.txt'. If empty: the sources of Python's standard library.
DATA ?=
# Number of test processes. Keep it low: many tests train, or measure the memory of the machine.
WORKERS ?= 2
# Extra arguments for pytest or the benchmarks, such as ARGS='-k order' or ARGS='--only demo'.
ARGS ?=

# Duration of `make endurance` in minutes.
MINUTES ?= 60

# Allow bytecode files: the tests start hundreds of processes, and each would compile the package again.
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
	    echo "$(PYTHON) is older than Python 3.11: give a newer one, for example make install PYTHON=python3.12" >&2; \
	    exit 1; }
	@theirs=$$($(VENV)/bin/python -c '$(BASE)' 2>/dev/null); mine=$$($(PYTHON) -c '$(BASE)'); \
	    [ ! -d $(VENV) ] || [ "$$theirs" = "$$mine" ] || { \
	    echo "$(VENV) uses another Python ($${theirs:-broken}) than $(PYTHON) ($$mine): remove it, or give another VENV" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

test: install ## run the fast tests
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

ALL = -m 'not (gpu or browser or slow or nightly)'

test-all: install ## run the fast and the longer tests, as continuous integration does
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)

demo: install ## train inside a budget in which plain PyTorch runs out of memory
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

rivals: $(RIVALS) ## install the tools of the comparison, each in an environment in .rivals

.rivals/%/.installed: benchmarks/rivals/%.txt
	$(PYTHON) -m venv .rivals/$*
	.rivals/$*/bin/python -m pip install --quiet -r $<
	@touch $@

bench: install ## run 30 minutes of benchmarks, save the results, update the tables of the pages
	$(RUN) benchmarks/bench.py $(ARGS)

bench-all: install ## run every benchmark, for hours; ARGS='--news A.csv --text B.txt' for real text
	$(RUN) benchmarks/bench.py --all $(ARGS)

gpu: ## check a GPU in 12 minutes, with the interpreter PYTHON; ARGS='--minutes 7' or ARGS=--resume
	@PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu $(ARGS)

picture: install ## create the picture of a report in README.md; needs Chromium
	$(RUN) benchmarks/picture.py

endurance: install ## train for MINUTES under a tight budget, with injected failures
	$(RUN) benchmarks/endurance.py --minutes $(MINUTES) $(if $(DATA),--data '$(DATA)')

nightly: install ## run the tests that take ten minutes or more
	$(RUN) -m pytest -m nightly $(ARGS)

$(VENV)/.installed-release: $(INSTALLED)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs,release]'
	@touch $@

coverage: $(VENV)/.installed-release ## measure which lines the tests run, including their subprocesses
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n $(WORKERS) --dist loadfile $(ALL) $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

# For `make mutants`: modules or folders, mutants for each module, and the random seed.
MUTATED ?= src/plimsoll/step/undo/step_state.py src/plimsoll/step/update/commit.py
NUMBER ?= 20
SEED ?= 0

mutants: $(VENV)/.installed-release ## check that tests notice NUMBER random changes of each module in MUTATED
	$(RUN) tests/mutants.py $(MUTATED) --number $(NUMBER) --seed $(SEED) --workers $(WORKERS)

dist: $(VENV)/.installed-release ## build the wheel and the source archive into dist/, and test them
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m pytest tests/test_distribution.py -m 'slow or not slow'

audit: $(VENV)/.installed-release ## check licences and, online, known vulnerabilities of dependencies
	$(RUN) -m pip check
	$(RUN) tests/licences.py
	$(RUN) -m pip_audit --strict --requirement constraints.txt --no-deps --disable-pip

clean: ## delete builds and caches, but not runs and VENV
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
