# Two commands do everything on a fresh machine: `make demo` and `make test`. The others are for who changes or publishes it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PYTHONHASHSEED := 0

.PHONY: demo quick test test-slow attacks lint package docs install clean

demo: $(VENV)/.installed
	$(BIN)/tailorfl compare demo --out demo --overwrite

# A file stays with one process, which shares what its tests share; files in order, so that the long ones come first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# The inner loop: every test function once, without processes and whole experiments.
quick: $(VENV)/.installed-dev
	$(PYTEST) --quick -m "not slow" $(TESTS)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow $(TESTS)

# What attacks and faults get from a deployment, each shown by its test, in some minutes.
attacks: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/attacks.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What goes to the package index, in dist, and proof that it works without this repository.
package: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m tailorfl.runs.catalogue
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	OMP_NUM_THREADS=1 $(BIN)/python tests/package/try_package.py dist

# The documents as a site in the folder site, to be opened from there or put on any server.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore $(BIN)/python -m mkdocs build --quiet --strict

install: $(VENV)/.installed-dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
