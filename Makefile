PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
WORKERS ?= 2
ARGS ?=
# One core per rank: two ranks on a small machine must not fight over threads.
export OMP_NUM_THREADS ?= 1

.PHONY: install train test check

$(BIN)/torchrun: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "torch==2.13.0"
	$(BIN)/pip install -q -e ".[dev]"
	@touch $@

install: $(BIN)/torchrun

train: install  ## a 10M-parameter GPT on real text, 2 local ranks, stage 3
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: install  ## the whole suite; tests of one process WORKERS at a time
	$(BIN)/python -m pytest -m "not ranks" -n $(WORKERS) --dist worksteal
	$(BIN)/python -m pytest -m ranks

check: install  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
