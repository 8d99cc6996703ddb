# `make demo` and `make test` do everything on a machine that has make and Python >= 3.11.
# Set-up runs once, and again whenever what it depends on changes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test check wheel clean help
help:
	@echo "make demo    set up, capture the bundled model on the bundled text, open the dashboard"
	@echo "make test    set up and run every check"
	@echo "make clean   remove the environment and what was built"

demo: $(VENV)/.demo
	@$(BIN)/twell demo --out runs/demo

test: $(VENV)/.test check
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.test .ns/twell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

wheel: $(VENV)/.test
	@rm -rf build dist && $(BIN)/python -m build --wheel --outdir dist . >/dev/null && ls dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Expected Python 3.11 or newer, got $$($(PYTHON) --version): set PYTHON=python3.x"; exit 2; }
	@echo "Creating the environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml .ci/constraints.txt
	@echo "Installing what the demo needs (once, a few minutes) ..."
	@$(PIP) install -qq -c .ci/constraints.txt -e '.[capture,dashboard]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml .ci/constraints.txt
	@echo "Installing what the tests need (once, a few minutes) ..."
	@$(PIP) install -qq -c .ci/constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.demo

# Type checkers see the namespace `twell` through this link: folder x/ is twell.x.
.ns/twell:
	@mkdir -p .ns && ln -sfn .. .ns/twell

clean:
	rm -rf $(VENV) .ns build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
