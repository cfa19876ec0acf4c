# Everything a contributor or a CI machine runs. Needs make and Python 3.11; the rest goes into .venv.
VENV   ?= .venv
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	  $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
INPUTS := pyproject.toml operators/pyproject.toml requirements/constraints.txt
ARGS   ?=
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test test-null test-slow test-gpu test-adapters check format docs bench lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.ready-run  ## a tiny model learns on the CPU, start to end, in minutes
	$(PY) -m examples.demo $(ARGS)

test: $(VENV)/.ready-test  ## every CPU test; first the ones without torch, alone, because they take seconds
	$(PY) -m pytest tests/null
	$(PY) -m pytest --ignore=tests/null $(ARGS)

test-null: $(VENV)/.ready-test  ## only the tests on the null engine
	$(PY) -m pytest tests/null $(ARGS)

test-slow: $(VENV)/.ready-test  ## the tests that take minutes
	$(PY) -m pytest -m "slow and not gpu" --timeout=1800 $(ARGS)

test-gpu:  ## the tests that need a CUDA device, in the Python that is active (or PY=...)
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m pytest tests/gpu -m gpu $(ARGS)

test-adapters: $(VENV)/.ready-test  ## adapters against the real verl and verifiers, trackers against W&B and MLflow, in environments of their own
	$(PY) requirements/adapters.py

check: $(VENV)/.ready-test  ## style, types, direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.ready-test  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.ready-test  ## the site, in site/; a warning is an error
	$(PY) -m mkdocs build --strict

bench: $(VENV)/.ready-test  ## the benchmarks
	$(PY) -m benchmarks $(ARGS)

lock: $(VENV)/.ready-test  ## rewrite the pinned versions from what .venv holds now
	$(PY) requirements/lock.py

clean:  ## remove what the targets above made
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch goes in first and by exact version: with the version left open, pip may choose a build with gigabytes of CUDA.
$(PY):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv found; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-run: $(INPUTS) | $(PY)
	$(PIP) "$$(grep '^torch==' requirements/constraints.txt)"
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e . -e operators
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-run requirements/data.txt
	$(PIP) --no-build-isolation -e '.[cpu,dev,docs,math]' -e 'operators[math]' accelerate gguf
	$(PIP) --no-deps -r requirements/data.txt
	$(PIP) reasoning-gym || echo "reasoning-gym was not installed (one of its dependencies needs a C compiler); its tests are skipped"
	@# vLLM asks for these; nothing here uses them, and their builds do not fit beside every torch
	$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
