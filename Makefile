# make demo   set up .venv and train a small model on real text (a few minutes on two cores)
# make test   set up .venv with the test tools; lint, types, the CPU test suite
# make bench  the CPU benchmarks; results go to benchmarks/results/
# make gpu-check  on a machine with a GPU: tests/gpu and the GPU benchmarks within ten minutes, logs in build/gpu-check
# make clean  remove .venv and caches
#
# Without an NVIDIA GPU torch is pinned to a release that is known to work on a CPU; with one it is the newest.
# Choose another build of torch with any pip arguments:  make demo TORCH="torch==2.14.1"

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types bench gpu-check clean

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
# Without a GPU the Triton kernels are tested on Triton's interpreter; with one, torch brings the Triton that it needs.
TRITON ?= $(shell nvidia-smi -L >/dev/null 2>&1 || test "$$(uname -sm)" != "Linux x86_64" || echo triton==3.6.0)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

.venv/python.stamp:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

# torch first and alone: the package's own requirement is a range, which must not replace the build chosen here.
.venv/torch.stamp: .venv/python.stamp
	$(PIP) install numpy "setuptools>=68" wheel
	$(PIP) install $(TORCH)
	touch $@

.venv/run.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) install --no-build-isolation --editable .
	touch $@

.venv/test.stamp: .venv/run.stamp
	$(PIP) install --no-build-isolation --editable ".[test]" $(TRITON)
	touch $@

setup: .venv/run.stamp

demo: .venv/run.stamp
	$(BIN)/python examples/train_packed_text.py

lint: .venv/test.stamp
	$(BIN)/ruff check .

types: .venv/test.stamp
	$(BIN)/mypy

# One process a core, one thread each: faster than threads, which wait for each other in small tests.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile

bench: .venv/run.stamp
	$(BIN)/python -m magi_flex bench

gpu-check: .venv/test.stamp
	$(BIN)/python -m benchmarks.gpu_check build/gpu-check

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
