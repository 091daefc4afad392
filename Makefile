PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PACKAGES := cli cli/render offload offload/cuda offload/simulated phases phases/diffusers planner planner/account planner/choosing planner/journal planner/ranks planner/serving

.PHONY: plan test test-all check bench sizes gpu-report

# One pipeline, one set of layers, two cards: opposite decisions.
plan: $(VENV)/.ready
	$(BIN)/residency plan qwen-image-2.1 --card "RTX 4090" --card "RTX 5090" --shape 720x720 \
	  --component-residency dit=resident,text_encoder=layerwise-offload,vae=resident \
	  --layerwise-resident-layers text_encoder=0.65 --explore 1

# Without a terminal's standard input, as in CI and in the background: a test that reads it fails.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" < /dev/null

# And the kill grids, the soaks, and every family at full scale.
test-all: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal < /dev/null

check: $(VENV)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m tests.bench

# What `--size auto` makes of each pipeline on each card: the table in the README.
sizes: $(VENV)/.ready
	$(BIN)/python -m tests.bench.sizes

# What a real card says; without make: python -m tests.gpu.report, in a checkout, nothing installed.
gpu-report: $(VENV)/.ready
	$(BIN)/python -m tests.gpu.report --out results.json

# The packages are installed as links to their files: a folder whose list of files has changed is
# linked anew.
$(VENV)/.ready: pyproject.toml $(PACKAGES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[diffusers,server,dev]"
	touch $@
