# `make demo` and `make test` need only Python 3.11 to 3.13, make and a package registry.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test,dev
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := runs/demo
# Processes that run tests at the same time; each file's tests stay together.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --doctest-modules
# TensorFlow greets on stderr, whatever its log level. So that goes to a file, shown on a failure.
QUIETLY := 2>$(DEMO)/stderr.txt || { cat $(DEMO)/stderr.txt >&2; exit 1; }

.PHONY: help demo test lint format clean

help:
	@echo "make demo    train Inception with and without BN on digits, export, classify"
	@echo "make test    run the tests and the examples of the docstrings"
	@echo "make lint    run ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove $(VENV) and $(DEMO)"

# The stamp lets a second run start at once; a changed requirement installs everything anew.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) not found; install Python 3.11 to 3.13, or say make PYTHON=PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: Python 3.11 to 3.13 needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); say make PYTHON=PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing into $(VENV), once; this takes some minutes"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) setuptools wheel
	@$(PIP_INSTALL) --no-build-isolation --editable ".[$(EXTRAS)]"
	@touch $@

# On processors without AVX512 TensorFlow leaves oneDNN off, with which the demo is 1.4 times faster.
demo: export TF_ENABLE_ONEDNN_OPTS ?= 1
demo: $(STAMP)
	@rm -rf $(DEMO)
	@mkdir -p $(DEMO)
	@$(BIN)/python -m training.experiments.digits_demo $(DEMO) $(QUIETLY)
	@echo '$$ bnzoo-export $(DEMO)/better $(DEMO)/saved_model'
	@$(BIN)/bnzoo-export $(DEMO)/better $(DEMO)/saved_model $(QUIETLY)
	@echo
	@$(BIN)/python export/classify.py $(DEMO)/saved_model/1 $(DEMO)/held_out.npz $(QUIETLY)

# In parts, each in processes of its own: TensorFlow keeps memory that it once had, and two
# processes that run all tests come to more than 20 GB.
test: $(STAMP)
	@failed=0; \
	$(PYTEST) tests/training || failed=1; \
	$(PYTEST) tests/export tests/pretrained || failed=1; \
	$(PYTEST) tests/models tests/surgery || failed=1; \
	$(PYTEST) tests/layers tests/test_*.py bnzoo || failed=1; \
	exit $$failed

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	@rm -rf $(VENV) $(DEMO)
