# make book                    the whole book from nothing: environment, notebooks, pages
# make test                    lint, types, tests
# make fig02                   one notebook, if its page is out of date
# make fig02 SCALE=smoke       the same at a scale (smoke, laptop, paper), always run
# make figures SCALE=smoke     every notebook
# make clean                   remove what was made, except the environment and results/
# In an environment that is ready (conda): make READY=1 book
PYTHON ?= python3
VENV := .venv
ifdef READY
BIN ?= $(patsubst %/,%,$(dir $(shell command -v python)))
else
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.installed
endif

NOTEBOOKS := $(basename $(notdir $(wildcard notebooks/*.py)))
# A page is the executed notebook, and run.json beside the figures and tables that it saved.
PAGES := $(foreach name,$(NOTEBOOKS),book/$(name).ipynb book/generated/$(name)/run.json)
PACKAGE := $(shell find leancluster_core -name '*.py')
TEXT := _config.yml book/_toc.yml book/references.bib book/check_html.py $(wildcard book/*.md) \
	$(shell find book/_static -type f) $(wildcard results/benchmarks/*)
RUN := $(BIN)/python -m leancluster_core.experiments.notebooks run

.DEFAULT_GOAL := book
# The runner replaces pages as a whole, so a run that fails leaves the last good one: make must too.
.PRECIOUS: book/%.ipynb book/generated/%/run.json
.PHONY: book test figures clean environment FORCE $(NOTEBOOKS)

# The book trains nothing: a page whose runs are not in results/ says so, and `make fig04` trains them.
book: STORED := --stored-only
book: _build/html/.complete
	@echo "The book: _build/html/index.html"

# Always from an empty folder: Sphinx repeats no warning of a page that it has cached.
_build/html/.complete: $(TEXT) $(PAGES) book/generated/claims.md book/generated/results.md | $(ENVIRONMENT)
	rm -rf _build/html _build/.doctrees _build/jupyter_execute
	$(BIN)/jupyter-book build . --toc book/_toc.yml -q -W -n --keep-going
	$(BIN)/python book/check_html.py _build/html
	@touch $@

book/generated/claims.md: book/claims.yml notebooks/assets.yml $(PAGES) \
		leancluster_core/experiments/claims_page.py $(wildcard results/verdicts/*.json) | $(ENVIRONMENT)
	$(BIN)/python -m leancluster_core.experiments.claims_page $@

book/generated/results.md: $(PAGES) $(wildcard results/*/*/provenance.json) \
		leancluster_core/experiments/results_page.py | $(ENVIRONMENT)
	$(BIN)/python -m leancluster_core.experiments.results_page $@

book/%.ipynb book/generated/%/run.json: notebooks/%.py $(PACKAGE) constraints.txt | $(ENVIRONMENT)
	$(RUN) $< $(STORED)

# Written by the runner: the runs a page shows and the files it saved, so that a new or missing one
# makes the page again.
-include $(wildcard book/generated/*/page.d)

ifdef SCALE
$(NOTEBOOKS): | $(ENVIRONMENT)
	$(RUN) notebooks/$@.py --scale $(SCALE)
else
$(NOTEBOOKS): %: book/%.ipynb book/generated/%/run.json
endif
figures: $(NOTEBOOKS)

test: $(ENVIRONMENT)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q

environment: $(ENVIRONMENT)

ifndef READY
$(ENVIRONMENT): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[book,cluster,dev]'
	@touch $@
endif

clean:
	rm -rf _build book/generated book/*.ipynb results/smoke
