PYTHON ?= python3
export PYTHON

BIN := .venv/bin
LATER := slow or rig or torch
RUNS ?= 200
FIRST ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo test faults clean

help: ## this list
	@echo "dflash-ops: build, ship, prove and run multi-threaded DFlash drafter training"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=/path/to/python3 chooses the Python (>= 3.10) that .venv is made with. PIP_* variables are honoured:"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets the small torch without CUDA."

demo: ## sets up .venv, then deploys playbooks/quickstart.yaml to this machine (CPU, minutes)
	@scripts/venv.sh trainer
	$(BIN)/dflash-ops deploy --host local --playbook quickstart

test: ## sets up .venv, then lint, types and all tests (root on Debian/Ubuntu: installs openssh-server, lxc, uidmap, sudo)
	@scripts/rig-packages.sh
	@scripts/venv.sh trainer,dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python -m pytest -m "not ($(LATER))"
	$(BIN)/python -m pytest -m "$(LATER)" -n 2 --ignore tests/faults
	$(BIN)/python -m pytest tests/faults -n 2

faults: ## RUNS=200 fault runs at places drawn from seeds, FIRST=0 the first (as root; about half an hour: for the night)
	@scripts/rig-packages.sh
	@scripts/venv.sh trainer,dev
	FAULT_RUNS=$(RUNS) FAULT_FIRST=$(FIRST) $(BIN)/python -m pytest tests/faults/test_fault_runs.py -n 2

clean: ## removes .venv and caches; runs/ and what training left on hosts stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dflash_ops trainer tests -type d -name __pycache__ -prune -exec rm -rf {} +
