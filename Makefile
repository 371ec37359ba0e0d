# make demo: set up, plan a run that does not fit, then train a tiny one for a minute.   make test: set up, run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OOMPH := $(BIN)/oomph

# Workers take whole stretches of the list, so that what a file's tests share is made once; the quick one takes over
# from the other. Bytecode is kept, whatever the environment says: the tests start many processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --durations 15 --durations-min 5

.PHONY: demo test slow lint types bench docs record refresh clean
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
	$(PYTEST) -m "not slow"

slow: $(VENV)/.dev
	$(PYTEST) -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/deno lint --quiet

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/deno check --quiet src/oomph/web/static/js/*.js

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/startup.py

# The documentation as a site in build/site; a broken link fails it.
docs: $(VENV)/.dev
	$(BIN)/zensical build --strict

# Asks inductor for its plans of the small models that the tests compare with, where torch or a model has changed.
record: $(VENV)/.dev
	OOMPH_RECORD=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 3600 tests/step/test_compiled_described.py tests/step/test_gpt_compiled_trace.py

# Puts today's outputs into README.md, docs/ and the example notebook.
refresh: $(VENV)/.dev
	$(BIN)/python docs/refresh.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
