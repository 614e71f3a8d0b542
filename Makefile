# Nothing has to be done before any of these but a clone; Python 3.11 or newer has to be there.
# PYTHON=/path/to/python3 chooses another one, ARGS="…" is passed on by demo, up, test and bench.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell for found in python3 python3.13 python3.12 python3.11; do \
	$$found -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$found; done))
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
MODELS := examples/models
ARGS ?=

.PHONY: help demo up test check lint types format bench protos prepare clean

help:
	@echo "make demo     classify a photo through a mesh of four processes, and show where the time went"
	@echo "make up       keep the example mesh running"
	@echo "make test     all tests                  make check   format, lint, types, then all tests"
	@echo "make bench    the numbers in bench/      make format  put the code in shape"
	@echo "make protos   the stubs from protos/     make clean   remove what these made"

demo: $(DEMO)
	@$(BIN)/python -m examples.demo $(ARGS)

up: $(DEMO)
	@$(BIN)/python -m examples.prepare
	@exec $(BIN)/tensorline up --model-repository $(MODELS) $(ARGS)

test: prepare
	@$(BIN)/python -m pytest $(ARGS)

check: lint types test

lint: $(DEV)
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check

types: $(DEV)
	@$(BIN)/mypy

format: $(DEV)
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: prepare
	@$(BIN)/python -m bench $(ARGS)

protos: $(DEV)
	@$(BIN)/python protos/generate.py

prepare: $(DEV)
	@$(BIN)/python -m examples.prepare --photos

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---- The virtual environment: made anew only when pyproject.toml or constraints.txt say something else.

# $(call install,extra): the newest thing that pip does on a terminal, elsewhere a line now and then.
define install
	@log=$(VENV)/install-$(1).log; tty=; [ -t 1 ] && tty=1; seen=0; \
	echo "Installing the packages for $(1) into $(VENV) (a minute or two at first)"; \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]' 2> $$log.err | tee $$log \
	| while IFS= read -r line; do \
		case $$line in Collecting*|Installing*|Building*) ;; *) continue ;; esac; \
		seen=$$((seen + 1)); \
		if [ $$tty ]; then printf '\r\033[K  %.70s' "$$line"; \
		elif [ $$((seen % 20)) = 0 ]; then echo "  $$seen packages found"; fi; \
	done || { [ $$tty ] && printf '\r\033[K'; grep -v '^WARNING' $$log.err | tail -n 15 >&2; exit 1; }; \
	[ -z $$tty ] || printf '\r\033[K'
	@$(BIN)/python -m pip check --disable-pip-version-check > $(VENV)/check.log || { cat $(VENV)/check.log >&2; exit 1; }
endef

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,demo)
	@touch $@

# What development needs includes what the demo needs.
$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,dev)
	@touch $@ $(DEMO)

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed and none was found; PYTHON=/path/to/python3 names one." >&2; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)." >&2; exit 1; }
