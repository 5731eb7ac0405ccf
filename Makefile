# A newcomer needs two of these: `make demo` and `make test`.
.PHONY: help environment demo test test-half test-other-half test-full test-full-half test-full-other-half storm test-gpu test-gpu-long lint clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environment:
	@bash scripts/bootstrap.sh

demo: environment ## install into .venv if needed, then run `gracetune demo`
	.venv/bin/gracetune demo

test: environment ## the everyday CPU tests (under 7 minutes on 2 cores)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-half test-other-half

# Two processes at a time, each with a core: tests/halves.py cuts the files into two parts that take about equally long.
# Bytecode is kept, whatever the shell says: compiling all of it takes seconds in each process the tests start.
pytest := PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest
everyday := $(pytest) -m 'not gpu and not full'
test-half:
	TEST_HALF=everyday-1 $(everyday)
test-other-half:
	TEST_HALF=everyday-2 $(everyday)

test-full: environment ## the long CPU tests (under 45 minutes on 2 cores; needs the network)
	@bash scripts/install_browser.sh
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-full-half test-full-other-half

long := $(pytest) -m 'full and not gpu'
test-full-half:
	TEST_HALF=full-1 $(long)
test-full-other-half:
	TEST_HALF=full-2 $(long)

# Results of cases are functions of the seed; STORM_OUTPUT=FILE writes the table as JSON too.
STORM_CASES ?= 500
STORM_SEED ?= 1
storm: environment ## kill, stop and starve 500 runs of every dialect (STORM_CASES, STORM_SEED); a table, 1 if one is wrong
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=tests .venv/bin/python -m storm --cases $(STORM_CASES) --seed $(STORM_SEED) $(if $(STORM_OUTPUT),--output $(STORM_OUTPUT))

# One process, a random order (ORDER=--order-seed=N repeats one), results merged into the file of this machine's GPU.
gpu_results ?= benchmarks/results
# A test that waits for a GPU that never answers cannot be interrupted: the thread method ends the process, and the
# results name the test.
on_gpu := .venv/bin/python -m pytest tests/gpu -q -rfE -p no:cacheprovider --durations=10 --timeout=180 --timeout-method=thread
test-gpu: environment ## the tests on a CUDA GPU, in one process
	$(on_gpu) -m 'gpu and not full' --gpu-results $(gpu_results) $(ORDER)

test-gpu-long: environment ## the long ones: every adapter's form, compiled
	$(on_gpu) -m 'gpu and full' --gpu-results $(gpu_results) $(ORDER)

# Where .venv borrows the machine's packages, one of these tools may be on the machine's PATH instead of in .venv/bin.
in_venv := PATH="$(CURDIR)/.venv/bin:$$PATH"
lint: environment ## ruff, mypy --strict (all but the CPU tests), import layers, reachable symbols, words, the docs site, shellcheck
	$(in_venv) ruff check .
	$(in_venv) ruff format --check .
	$(in_venv) mypy --strict src overlays/simpletuner/src
	$(in_venv) MYPYPATH=tests mypy --strict --explicit-package-bases --follow-imports=silent tests/gpu benchmarks
	$(in_venv) MYPYPATH=scripts/upstream_features:scripts/peer_vectors:overlays/simpletuner/src:tests mypy --strict --explicit-package-bases --follow-imports=silent scripts
	$(in_venv) MYPYPATH=tests/unit/overlays/ai_toolkit/standin mypy --strict overlays/ai_toolkit/gracetune_overlay
	$(in_venv) lint-imports
	.venv/bin/python scripts/check_reachable.py
	.venv/bin/python scripts/check_words.py
	NO_MKDOCS_2_WARNING=1 $(in_venv) mkdocs build --strict
	$(in_venv) shellcheck scripts/*.sh .ci/run

clean: ## remove .venv and everything else these targets create
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
