# Penstock: everything runs from its own environment in .venv; `make` alone lists the targets.
# Nothing is installed twice: a stamp file records that the environment matches pyproject.toml and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Without bytecode on disk, every server that a test starts compiles our modules again, and every worker all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV ?= .venv
ARGS ?=
EXTRAS ?=

BIN := $(VENV)/bin
# An environment whose creation was interrupted may lack pip: ensurepip puts it back.
PIP := $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; \
       $(BIN)/python -m pip --disable-pip-version-check
# The pip of Python 3.11 takes twice as long to choose versions as a current one; where that cannot be had, it has to do.
# With setuptools in place, pip need not put up an environment only to read pyproject.toml.
BUILD_TOOLS := install --quiet --no-compile -c constraints.txt 'pip>=25' 'setuptools>=77'
PREPARE := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python $(BUILD_TOOLS) 2>/dev/null \
             || { $(PIP) $(BUILD_TOOLS); } || :; $(BIN)/python -m pip --version >/dev/null 2>&1 \
             || { echo "No pip could be put into $(VENV): neither $(PYTHON) nor the package index has a usable one." \
                  "On Debian or Ubuntu: apt install python3-venv, then make again" >&2; exit 1; }
INSTALL := isolation=$$($(BIN)/python -c 'import setuptools.command.bdist_wheel' 2>/dev/null && echo --no-build-isolation || :); \
           $(BIN)/python -m pip --disable-pip-version-check install --no-compile $$isolation -c constraints.txt -e
# constraints.txt is the whole test environment. Its packages come first, in two halves beside each other and without asking
# what each needs: reading the index takes most of the time. The install that follows adds what this machine needs besides.
# The halves belong to xargs, not to the shell, which would have Ctrl-C ignored by what it starts in the background.
PINNED := printf '%s\n' 0 1 | xargs -n 1 -P 2 bash -c '$(BIN)/python -m pip --disable-pip-version-check install \
             --progress-bar off --no-compile --no-deps -r <(awk "NR % 2 == $$0" constraints.txt)' \
           || echo "Not every pinned package is to be had for this machine: choosing those that are needed"
# Compiled once per machine and version into the user's cache, so that the first start does not have to; the script needs
# nothing but Python, so it runs while packages are installed.
KERNELS := PYTHONPATH=. $(BIN)/python -P penstock/engine/backends/cpu/build.py
# The console's browser libraries, likewise: fetched once from the package index into the user's cache.
LIBRARIES := PYTHONPATH=. $(BIN)/python -P penstock/console/libraries.py
# Our own bytecode, all of which tests need, while packages are installed; that of tests is written by pytest.
BYTECODE := $(BIN)/python -m compileall -qq -x '/(test_|conftest)' penstock tests || :
RUN_STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
INPUTS := pyproject.toml constraints.txt
# Of several makes one installs, and the others use what it installed. Whatever is still running holds the lock.
ALONE := trap 'exit 130' INT; exec 9<Makefile; \
         waited=$$($(PYTHON) -c "$$LOCK" $(VENV))
define LOCK
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Waiting for another make that installs into", sys.argv[1], file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
    print("waited")
except OSError:
    pass # a file system without locks
endef
export LOCK
DONE_MEANWHILE = [ "$$waited" ] && [ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ]
# pip writes INSTALLER last: a package without it was interrupted, and pip would take it for installed.
MEND := for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
          [ -e "$$info/INSTALLER" ] || rm -rf "$$info"; \
        done
# Without its interpreter (another Python was installed), an environment has to be made and filled again.
$(shell [ -x $(BIN)/python ] || rm -f $(RUN_STAMP) $(TEST_STAMP) $(BIN)/python*)

.PHONY: help
help: ## show this list
	@echo "Penstock: make TARGET [ARGS=\"...\"]"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "  %-12s  %s\n", $$1, $$2 }'
	@echo
	@echo "  First time here:  make serve                 then open http://127.0.0.1:8000/ and chat"
	@echo "  API reference:    http://127.0.0.1:8000/docs"
	@echo "  Other settings:   make serve ARGS=\"--port 9000\"   (all of them: $(BIN)/penstock serve --help)"

.PHONY: serve
serve: $(RUN_STAMP) ## install what is needed, fetch the default model, serve it on 127.0.0.1:8000
	@exec $(BIN)/penstock serve $(ARGS)

.PHONY: extras
extras: $(RUN_STAMP) ## install optional parts into .venv: EXTRAS=postgres,redis,kafka,clickhouse,guardrails,mcp,s3,otel or all
	@[ -n "$(EXTRAS)" ] || { echo "extras: name them, for example: make extras EXTRAS=postgres,otel" >&2; exit 1; }
	@$(PIP) install --no-compile -c constraints.txt -e '.[serve,$(EXTRAS)]'

# setup.py says what is made for it. An old build folder would put files into it that are no longer there.
.PHONY: wheel
wheel: $(RUN_STAMP) ## build dist/penstock-*.whl, with native kernels for every instruction set (a minute or two)
	@rm -rf build dist/penstock-*.whl && mkdir -p dist && $(PIP) wheel --no-deps --wheel-dir dist .
	@ls -sh dist/*.whl

# Tests wait for servers and clocks a good part of their time: one process more than there are cores fills the gaps, and
# types and layers, reported last, are checked beside them. Files keep the order of tests/conftest.py: the longest first.
.PHONY: test
test: ruff ## lint, and every quick test in parallel (ARGS go to pytest)
	@log=$$(mktemp); $(MAKE) types >"$$log" 2>&1 & types=$$!; status=0; \
	  trap 'rm -f "$$log"; kill $$types 2>/dev/null || :' EXIT; trap 'exit 130' INT; \
	  workers=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )); \
	  $(BIN)/python -m pytest -n $$workers --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS) || status=$$?; \
	  wait $$types || status=$$?; cat "$$log"; exit $$status

.PHONY: test-slow
test-slow: $(TEST_STAMP) ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow $(ARGS)

# Everything is pinned in tests/clients/clients.toml. Environments are kept in .clients (PENSTOCK_CLIENTS=FOLDER for another).
.PHONY: test-clients
test-clients: $(TEST_STAMP) ## real clients, each installed into .clients, against a server; writes docs/clients.md (ARGS="-k litellm")
	@PENSTOCK_CLIENTS_REPORT=1 $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

.PHONY: fuzz
fuzz: $(TEST_STAMP) ## the fuzzers, ten minutes each (PENSTOCK_FUZZ_SECONDS=60 for less)
	@$(BIN)/python -m pytest -m slow tests/fuzz $(ARGS)

.PHONY: mutants
mutants: $(TEST_STAMP) ## small faults in pure modules: do their tests notice? (ARGS="--seed 2 --per-module 10")
	@$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: audit
audit: $(TEST_STAMP) ## the pinned dependencies: known vulnerabilities, licences, whether each is needed
	@$(BIN)/python deploy/audit.py $(ARGS)

# A GPU machine is often sealed, with torch and triton installed system-wide and nothing to be added. tests/gpu/run.py
# needs only those, and compiles all kernels in parallel before it starts; under pytest they compile one by one.
.PHONY: test-gpu
test-gpu: ## the tests that need a CUDA device, with the system's own python and torch
	@$(GPU_PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)' 2>/dev/null \
	  || { echo "test-gpu: $(GPU_PYTHON) has no torch that sees a CUDA device (choose another: make test-gpu GPU_PYTHON=...)" >&2; exit 1; }
	@PYTHONPATH=. $(GPU_PYTHON) tests/gpu/run.py --no-bench $(ARGS)

.PHONY: lint
lint: ruff types ## ruff (rules and format), mypy --strict and the import-layer check

.PHONY: ruff
ruff: $(TEST_STAMP)
	@echo "ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . \
	  || { echo "lint: try 'make format'" >&2; exit 1; }

.PHONY: types
types: $(TEST_STAMP)
	@echo "mypy"; $(BIN)/mypy
	@echo "import layers"; $(BIN)/lint-imports --no-logo

.PHONY: format
format: $(TEST_STAMP) ## fix what ruff can fix
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

.PHONY: bench
bench: $(TEST_STAMP) ## offline engine benchmark of the default model, then against transformers
	@$(BIN)/penstock bench engine $(ARGS)
	@$(BIN)/penstock bench compare

.PHONY: clean
clean: ## remove caches and build output (the environment and downloaded models stay)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find penstock tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## clean, and remove the environment too
	@rm -rf $(VENV)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null \
	  || { echo "Penstock needs Python 3.11 or newer; no '$(PYTHON)' found. Install it, or: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Penstock needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V)"
	@$(ALONE); [ ! -x $(BIN)/python ] || exit 0; \
	  $(PYTHON) -c 'import sys; from importlib.util import find_spec; sys.exit(not (find_spec("pip") or find_spec("ensurepip")))' \
	  && $(PYTHON) -m venv --without-pip $(VENV) \
	  || { rm -rf $(VENV); echo "Could not create $(VENV). On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

# Bytecode is written when a module is first imported, not for every module of every package (--no-compile).
# Order-only on the interpreter: its timestamp is the system python's and says nothing about the environment.
$(RUN_STAMP): $(INPUTS) | $(BIN)/python
	@echo "Installing Penstock into $(VENV) (a few hundred megabytes the first time)"
	@$(ALONE); $(DONE_MEANWHILE) && exit 0; $(KERNELS) 9<&- & kernels=$$!; $(MEND); $(PREPARE); $(INSTALL) '.[serve]'; $(LIBRARIES); wait $$kernels; touch $@

$(TEST_STAMP): $(INPUTS) | $(BIN)/python
	@echo "Installing Penstock and its test tools into $(VENV) (a few hundred megabytes the first time)"
	@$(ALONE); $(DONE_MEANWHILE) && exit 0; { $(KERNELS); $(BYTECODE); } 9<&- & kernels=$$!; $(MEND); $(PREPARE); $(PINNED); $(INSTALL) '.[test]'; $(LIBRARIES); wait $$kernels; touch $(RUN_STAMP) $@
