# What a newcomer types: `make train`, `make test`. Everything else is a part of one of them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
STAMP := .venv/.setup-done
# Further key=value settings of a command: make train ARGS="seed=1 trainer.steps=20"
ARGS ?=

.PHONY: help setup train smoke test test-slow lint clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## install everything into .venv (skipped when nothing changed)

$(STAMP): pyproject.toml constraints.txt overrides.txt scripts/setup.sh scripts/probe_rendering.py
	bash scripts/setup.sh
	touch $(STAMP)

train: setup  ## train a VLA policy on the default task with WMRL, into runs/demo
	$(PYTHON) -m vla.demo $(ARGS)

smoke: setup  ## the same in its smallest size, into runs/smoke (a fresh folder each time)
	rm -rf runs/smoke
	$(PYTHON) -m vla.demo name=smoke size=smoke $(ARGS)

lint: setup  ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test: lint  ## lint, then the tests
	$(PYTHON) -m pytest $(ARGS)

test-slow: setup  ## the tests marked slow
	$(PYTHON) -m pytest -m slow $(ARGS)

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf .venv .bootstrap build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
