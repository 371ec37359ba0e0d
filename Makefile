# make demo: set up, and plan a run that does not fit, and one that does.   make test: set up, and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OOMPH := $(BIN)/oomph

.PHONY: demo test slow lint types bench readme clean
.DELETE_ON_ERROR:

# The stamps make the second call quick: pip runs again only when what it reads has changed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "oomph needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,web,dev]'
	@touch $@ $(VENV)/.core

demo: $(VENV)/.core
	$(OOMPH) plan examples/fineweb_124m.py --gpu "RTX 4070" || test $$? -eq 1  # 1 is the honest answer: it does not fit

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/startup.py

readme: $(VENV)/.dev
	$(BIN)/python docs/refresh_readme.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
