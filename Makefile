# `make demo` and `make test` do everything on a machine that has make and Python >= 3.11.
# Set-up runs once, and again whenever what it depends on changes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(abspath $(BIN)):$(PATH)
# Of the 18 000 modules that are installed a part is imported, and compiled as it is: not all of them beforehand.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick check lint format fuzz docs sanitize built-for-gpu wheel clean help
help:
	@echo "make demo    set up, capture the bundled model on the bundled text, open the dashboard"
	@echo "make test    set up and run every check"
	@echo "make quick   lint, types, and the tests that a change breaks most often: before each commit"
	@echo "make format  lay out Python by ruff, C++ and CUDA by clang-format, as lint has it"
	@echo "make fuzz    thousands of damaged runs, and of each other subject of tests/support/fuzz"
	@echo "make sanitize    the GPU tests under compute-sanitizer, on a machine with a Hopper GPU"
	@echo "make docs    write data/BENCHMARKS.md, data/CLAIMS.md and the columns of data/README.md anew"
	@echo "make wheel   build dist/*.whl: the package with its data, for pip"
	@echo "make clean   remove the environment and what was built"

demo: $(VENV)/.demo
	@$(BIN)/twell demo --out runs/demo

# Three more processes than processors, up to five: some tests wait for a browser or for another process, and the types are
# checked beside them. Tests that go by the clock run when the others have ended, with nothing beside them.
PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(min(5, os.cpu_count() + 3))')
PYTEST     = $(BIN)/python -m pytest --processes=$(PROCESSES)
test: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST); tests=$$?; wait $$types && exit $$tests

# Before each commit: lint, types, and the tests that a change breaks most often, without captures, servers and compilers.
QUICK = $(addprefix tests/,architecture/test_rooms.py kernels/test_layout.py kernels/test_checks.py kernels/test_modules.py \
	workbench/run/test_manifest.py workbench/run/test_writer.py workbench/text workbench/test_cli.py analysis/activity \
	analysis/tokens analysis/speed app/ui/test_formatting.py app/test_pages.py app/test_lacking_runs.py)
# Nothing there waits, so there is one process for each of two processors.
quick: PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(2, os.cpu_count()))')
quick: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST) $(QUICK); tests=$$?; wait $$types && exit $$tests

check: lint
	@$(BIN)/mypy

# C++ and CUDA, by kernels/.clang-format.
SOURCES = $(shell find kernels -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
lint: $(VENV)/.test .ns/twell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(SOURCES) </dev/null || { echo "make format lays them out"; exit 1; }
	@echo "$(words $(SOURCES)) C++ and CUDA files already formatted"

format: $(VENV)/.test
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(SOURCES)

# Seeded fuzzers: a subject is a module of tests/support/fuzz. Failures are run again by number: --only N --seed SEED.
FUZZED ?= damage texts models kernel_calls
CASES  ?= 2000
SEED   ?= 0
fuzz: $(VENV)/.test
	@for subject in $(FUZZED); do PYTHONPATH=tests $(BIN)/python -m support.fuzz $$subject --cases $(CASES) --seed $(SEED) \
		|| failed=1; done; exit $${failed:-0}

# A tool and a file of tests at a time, or some at once: make -j8 sanitize. racecheck takes seconds a call, so it watches
# as many calls of each test as take WATCH seconds each in the mean (SEED draws others), and all `calls`, one of every path.
SANITIZER  = $(VENV)/sanitizer/nvidia/cu13/bin/compute-sanitizer
GPU_TESTS  = $(filter-out test_sanitizer test_delays,$(basename $(notdir $(shell grep -rl --include='test_*.py' mark.gpu tests))))
SANITIZED  = $(foreach tool,memcheck initcheck racecheck,$(GPU_TESTS:%=$(tool)-%)) racecheck-calls
SAN_CALLS  = tests/support/sanitized.py few middle loud tiles many whole cuda
SAN_TESTS  = -O -m pytest --assert=plain -p support.sanitized_tests -p no:cacheprovider -m gpu -o timeout=0 $(shell find tests -name $(lastword $(subst -, ,$@)).py)
WATCH     ?= 0.05
sanitize: $(SANITIZED)

$(SANITIZED): export PYTHONPATH = tests
$(SANITIZED): export PYTORCH_ALLOC_CONF = backend:cudaMallocAsync
$(filter racecheck-test%,$(SANITIZED)): export WATCH := $(WATCH)
$(SANITIZED): built-for-gpu
	@mkdir -p build && $(SANITIZER) --tool $(firstword $(subst -, ,$@)) --kernel-name kns=twell --error-exitcode 9 \
		--show-backtrace device $(if $(filter racecheck-test%,$@),--nvtx-include watched) $(BIN)/python \
		$(if $(filter %-calls,$@),$(SAN_CALLS),$(SAN_TESTS)) >build/$@.txt 2>&1 \
		|| { tail -n 60 build/$@.txt; echo "$@ failed: build/$@.txt"; exit 1; }
	@echo "$@: $$(grep -aE ' passed|all done|^watched' build/$@.txt | tail -n 2 | tr '\n' ' '), $$(grep -a SUMMARY build/$@.txt)"

built-for-gpu: $(SANITIZER)
	@$(BIN)/python -c 'import sys, torch; from twell.kernels import build; from twell.kernels.backends import cuda, hopper, union_counts as unions; at = torch.device("cuda"); \
		sys.exit(hopper.refuses(at, torch.bfloat16, 64, 64, 1) or cuda.refuses(at, torch.bfloat16, 64, 64, 1) \
		or build.failure(unions.library(torch.cuda.get_device_capability())))'

$(SANITIZER): $(VENV)/.test
	@$(PIP) install -qq --target $(VENV)/sanitizer 'nvidia-cuda-sanitizer-api>=13.5'

# The pages of data/ that are generated from the recorded runs.
docs: $(VENV)/.test
	@$(BIN)/python -m twell.analysis.exports.pages

wheel: $(VENV)/.test
	@rm -rf build dist && $(BIN)/python -m build --wheel --outdir dist . >/dev/null && ls dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Expected Python 3.11 or newer, got $$($(PYTHON) --version): set PYTHON=python3.x"; exit 2; }
	@echo "Creating the environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }  # what is left has no pip, as on Debian without python3-venv

$(VENV)/.demo: $(BIN)/python pyproject.toml .ci/constraints.txt
	@echo "Installing what the demo needs (once, a few minutes) ..."
	@$(PIP) install -qq --no-compile -c .ci/constraints.txt -e '.[capture,dashboard]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml .ci/constraints.txt
	@echo "Installing what the tests need (once, a few minutes) ..."
	@$(PIP) install -qq --no-compile -c .ci/constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.demo

# Type checkers see the namespace `twell` through this link: folder x/ is twell.x.
.ns/twell:
	@mkdir -p .ns && ln -sfn .. .ns/twell

clean:
	rm -rf $(VENV) .ns build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
