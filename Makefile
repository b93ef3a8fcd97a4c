# Needs python3 (3.11 or newer, with venv and pip), make and gcc. Everything it makes stays in this folder, except
# what `ferrule fetch` keeps in its cache.

PYTHON ?= python3
VENV := .venv
TOX_VENV := .venv-tox
PIP_INSTALL := -m pip install --disable-pip-version-check -c envs/host.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo models test bench fuzz clean

help:
	@echo "make setup   the environment .venv, with both packages and pinned versions"
	@echo "make demo    from a checkpoint to a picked, running bundle"
	@echo "make models  fetch the small real model into the cache"
	@echo "make test    every check: tests, board, types, lint, documents"
	@echo "make bench   speed against the oracles, and peers beside us"
	@echo "make fuzz    the readers against changed inputs, for a minute (FUZZ_SECONDS)"
	@echo "make clean   remove what these made, except the cache"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml runtime/pyproject.toml envs/host.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -e './runtime[onnx]' -e .
	@touch $@

$(TOX_VENV)/.ready: envs/host.txt
	rm -rf $(TOX_VENV)
	$(PYTHON) -m venv $(TOX_VENV)
	$(TOX_VENV)/bin/python $(PIP_INSTALL) --quiet tox
	@touch $@

demo: setup
	$(VENV)/bin/python -m ferrule_benchmarks.demo

models: setup
	$(VENV)/bin/ferrule fetch smollm2-135m

test: $(TOX_VENV)/.ready
	$(TOX_VENV)/bin/tox run -e lint,types,board,docs,py

bench: $(TOX_VENV)/.ready
	$(TOX_VENV)/bin/tox run -e bench,genai

fuzz: $(TOX_VENV)/.ready
	$(TOX_VENV)/bin/tox run -e fuzz

clean:
	rm -rf $(VENV) $(TOX_VENV) .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
