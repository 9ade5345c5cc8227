# Rungway. `make` alone lists the targets.
#
#   CONFIG  platform file for `make serve`          (config/quickstart.yaml)
#   STATE   state directory, overrides state_dir    (from the platform file)
#   PORT    HTTP port, overrides listen.port        (from the platform file)
#   PYTHON  the interpreter that .venv is made from (python3; 3.11 or newer)
#   TORCH_INDEX  extra package index to take torch from. PyPI's default torch for Linux on x86-64 is built for CUDA and
#                several GB; for the CPU build where your index carries only that one:
#                make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

CONFIG ?= config/quickstart.yaml
STATE ?=
PORT ?=
PYTHON ?= python3
TORCH_INDEX ?=
BENCH ?= gateway

BIN := .venv/bin
STAMP := .venv/.installed
ROOTS := platform/rungway replicas/rungway kernels/rungway chaos/rungway
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help setup serve demo drill test check bench bench-engine sim-nightly test-kernels test-gpu clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install Rungway with its pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Rungway needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make setup PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m rungway.kernels.cpu
	@touch $@

serve: $(STAMP) ## Start the platform (CONFIG= STATE= PORT=); Ctrl-C ends every process it started
	@exec $(BIN)/rungway serve --config $(CONFIG) $(if $(STATE),--state $(STATE)) $(if $(PORT),--port $(PORT))

demo: $(STAMP) ## Two tenants, a stream, a downgrade and the bill, printed
	@$(BIN)/rungway demo

drill: $(STAMP) ## Load and faults against a real platform, with verdicts (DRILL=peak-load|...|all)
	@$(BIN)/rungway drill $(or $(DRILL),list)

test: $(STAMP) ## The whole test suite
	$(BIN)/pytest

check: $(STAMP) ## Lint, format, types, layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(ROOTS)
	$(BIN)/pytest -q tests/unit/test_layout.py tests/unit/test_tidy.py

bench: $(STAMP) ## Measure beside other gateways (BENCH=gateway|engine|...)
	@$(BIN)/rungway bench $(BENCH)

bench-engine: $(STAMP) ## Our engine beside vLLM, llama.cpp and transformers (MODEL= THREADS= ROUNDS=)
	@$(BIN)/rungway bench engine $(if $(MODEL),--model $(MODEL)) $(if $(THREADS),--threads $(THREADS)) $(if $(ROUNDS),--rounds $(ROUNDS))

sim-nightly: $(STAMP) ## 10,000 simulated worlds with faults (SEEDS=FROM:TO)
	@$(BIN)/rungway simulate --seeds $(or $(SEEDS),0:10000) --faults all --jobs 2

test-kernels: $(STAMP) ## The kernels' tests: references, Triton's interpreter, compilation for GPUs, CPU kernels
	$(BIN)/pytest tests/kernels
	$(BIN)/python -m rungway.kernels.compile_check 80 90 100

test-gpu: $(STAMP) ## Check and time the kernels on a CUDA device (OUT= folder for JSON, table and tiles, SEARCH=1 tries tiles), then the tests marked gpu
	@$(BIN)/python -m rungway.kernels.gpu_check $(if $(SEARCH),--search --seconds 900) \
	  $(if $(OUT),--json $(OUT)/kernels.json --markdown $(OUT)/kernels.md --tiles $(OUT)/tiles.json); status=$$?; \
	$(BIN)/pytest -m gpu tests/engine && exit $$status

clean: ## Remove .venv and caches (state directories stay)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
