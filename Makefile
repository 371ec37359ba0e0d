# make demo: set up, plan a run that does not fit, then train a tiny one for a minute.   make test: set up, run the tests.
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

$(VENV)/.train: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,web,dev]'
	@touch $@ $(VENV)/.train

demo: $(VENV)/.train
	$(OOMPH) plan examples/fineweb_124m.py --gpu "RTX 4070" || test $$? -eq 1  # 1 is the honest answer: it does not fit
	$(OOMPH) data builtin:python --out data/python --tokenizer bytes
	$(OOMPH) train examples/tiny_python.toml --overwrite
	$(OOMPH) sample out/demo --prompt "def " --tokens 200

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
