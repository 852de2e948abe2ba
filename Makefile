# venv: everything pinned.  demo: the whole life of a small model in several precisions.  test: what CI runs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: venv demo test lint format clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARMS   ?= nvfp4-hybrid mxfp8 bf16-gemm
OUT    ?= runs/demo
BIN    := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
STAMP  := .venv/.installed
TOOLS  := .venv/.tools
empty  :=
comma  := ,
# `make test PYTEST='tests/ops -k sr'` runs a part.
PYTEST ?= -n 2

venv: $(TOOLS)

# Bytecode is made at first import, for the modules that are used; compiling all of it here takes minutes.
$(STAMP): pyproject.toml constraints.txt
	"$(PYTHON)" -m venv .venv
	$(INSTALL) -e '.[eval]'
	@touch $@

$(TOOLS): $(STAMP)
	$(INSTALL) -e '.[eval,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m lightning_nvfp4.cli pipeline --config recipes/pipeline.yaml --out "$(OUT)" \
		--arms "$(subst $(empty) $(empty),$(comma),$(strip $(ARMS)))" --allow-code-execution

lint: $(TOOLS)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest $(PYTEST)

format: $(TOOLS)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf .venv runs build dist
