# `make demo`, `make test`, `make coverage` and `make docs`, each of which sets up its own environment
# first; `make gate` runs every wrong program against its tests (`make gate CHANGED=HEAD~3`: those
# that changed since), `make extras` the environments of every suite, `make parity` pretrained models
# beside transformers. `make bench` times ours beside its peers and writes the table of docs/benchmarks.md;
# `make bench BENCH=--only=rejax` some rows of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test check slow gate extras parity coverage docs bench clean

demo: $(VENV)/installed
	$(BIN)/python experiments/demo.py

test: check $(VENV)/extras
	$(BIN)/python -m pytest -n $(WORKERS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/extras
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

gate: $(VENV)/extras
	$(BIN)/python tests/gate.py --workers=$(WORKERS) $(if $(CHANGED),--changed=$(CHANGED))

extras: $(VENV)/suites
	$(BIN)/python -m pytest -n $(WORKERS) -m '' tests/test_adapters_*.py

parity: $(VENV)/transformers
	cd tests && JAX_PLATFORMS=cpu ../$(BIN)/python parity.py

coverage: $(VENV)/extras
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

bench: $(VENV)/extras
	$(BIN)/python experiments/benchmarks/bench/bench.py --page=docs/benchmarks.md $(BENCH)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; $(PYTHON) is older. Name another: make demo PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Environments that only the tests need.
$(VENV)/extras: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,brax,envpool,jumanji,math,pretrained]'
	touch $@

# What `make test` does without: large, or slow to compile.
$(VENV)/suites: $(VENV)/extras
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[craftax,playground,xminigrid]'
	touch $@

# PyTorch and transformers, which nothing but the comparison needs.
$(VENV)/transformers: $(VENV)/extras
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 transformers==5.23.0
	touch $@

clean:
	rm -rf $(VENV) .jax_cache .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
