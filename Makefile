# `make` lists what there is. Every target that needs the environment makes it first, once.

PYTHON ?= python3
VENV ?= .venv
# A text file or a pattern such as 'corpus/*.txt' for the demo; empty: the sources of Python's standard library.
DATA ?=
# Processes that run the tests, a file of tests at a time. Few: many tests train, or watch the machine's memory.
WORKERS ?= 2
# Further arguments of pytest or of the benchmarks, for example ARGS='-k order' and ARGS='--only demo'.
ARGS ?=

RUN = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed

.PHONY: help install test demo lint docs bench bench-all picture rivals clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "  with PYTHON=$(PYTHON) VENV=$(VENV) DATA=$(DATA) WORKERS=$(WORKERS) ARGS=$(ARGS)"

install: $(INSTALLED) ## make the environment in VENV with the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is not Python 3.11 or newer: give one that is, for example make install PYTHON=python3.12" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@

test: install ## run the tests
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

demo: install ## train inside a budget that plain PyTorch does not survive
	$(RUN) benchmarks/demo.py $(if $(DATA),--data '$(DATA)')

lint: install ## check formatting, style and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: install ## build the documentation into site/, with warnings as errors and nothing from a network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(RUN) -m mkdocs build --strict

RIVALS = $(patsubst benchmarks/rivals/%.txt,.rivals/%/.installed,$(wildcard benchmarks/rivals/*.txt))

rivals: $(RIVALS) ## install other tools to compare with, in environments of their own below .rivals

.rivals/%/.installed: benchmarks/rivals/%.txt
	$(PYTHON) -m venv .rivals/$*
	.rivals/$*/bin/python -m pip install --quiet -r $<
	@touch $@

bench: install ## run the benchmarks that fit into 30 minutes, file their results and rewrite the tables of README.md
	$(RUN) benchmarks/bench.py $(ARGS)

bench-all: install ## run every benchmark, for hours; real text with ARGS='--news agnews-test.csv --text wikitext2-valid.txt'
	$(RUN) benchmarks/bench.py --all $(ARGS)

picture: install ## make the picture of a report in README.md anew, where there is Chromium
	$(RUN) benchmarks/picture.py

clean: ## remove builds and caches; runs and VENV stay
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
