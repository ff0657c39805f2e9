# Every target does its own set-up: a virtual environment in .venv with pinned requirements.
PYTHON ?= python3
RUN_DIR ?= runs/default
TORCH_VERSIONS ?= 2.11.0 2.13.0 2.15.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test test-all test-peers test-torch lint bench clean
.PRECIOUS: .venv-torch-%/ready

train: .venv/run  ## train the built-in decoder on the embedded functions with 2 workers
	$(BIN)/isostep train examples/run.toml --run-dir $(RUN_DIR)

test: .venv/dev  ## a covering subset, under 10 minutes on 2 cores
	$(BIN)/pytest -m "not grid"

test-all: .venv/dev  ## everything, the full grids included
	$(BIN)/pytest

test-peers: .venv-peers/ready  ## the audit on real libraries: transformers, accelerate, lightning, trl
	.venv-peers/bin/pytest tests/peers

test-torch: $(TORCH_VERSIONS:%=test-torch-%)  ## pipeline stages on each torch; 5 GB each where only a CUDA build exists

test-torch-%: .venv-torch-%/ready
	.venv-torch-$*/bin/pytest -m "not grid" tests/test_stages.py tests/test_schedule_torch.py tests/test_stages_faults.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/dev  ## prints the tables of benchmarks/README.md
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/schedule.py
	$(BIN)/python benchmarks/lab.py
	$(BIN)/python benchmarks/pipeline.py

clean:
	rm -rf .venv .venv-peers .venv-torch-* build src/*.egg-info .pytest_cache .ruff_cache .hypothesis

.venv/run: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

.venv/dev: requirements-dev.txt .venv/run
	$(PIP) -r requirements-dev.txt
	touch $@

.venv-peers/ready: requirements-peers.txt requirements.txt pyproject.toml
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-peers.txt
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

.venv-torch-%/ready: requirements.txt requirements-dev.txt pyproject.toml
	test -x .venv-torch-$*/bin/python || $(PYTHON) -m venv .venv-torch-$*
	sed -e '/^torch==/d' -e '/^setuptools==/d' -e '/^-r/d' requirements.txt requirements-dev.txt > .venv-torch-$*/pins.txt
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-torch-$*/pins.txt \
		torch==$* 'setuptools>=77' numpy pydantic rich pytest pytest-timeout
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
