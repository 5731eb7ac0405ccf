# A newcomer needs two of these: `make demo` and `make test`.
.PHONY: help environment demo test test-half test-other-half test-full lint clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environment:
	@bash scripts/bootstrap.sh

demo: environment ## install into .venv if needed, then run `gracetune demo`
	.venv/bin/gracetune demo

test: environment ## the everyday CPU tests (under 10 minutes on 2 cores)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-half test-other-half

# Two processes at a time, each with a core: about the same time for both.
everyday := .venv/bin/python -m pytest -m 'not gpu and not full'
half := $(wildcard $(addprefix tests/unit/,adapters cli hardware memory models))
test-half:
	$(everyday) $(half)
test-other-half:
	$(everyday) $(addprefix --ignore=,$(half))

test-full: environment ## the long CPU tests (under 25 minutes; needs the network)
	.venv/bin/python -m pytest -m 'full and not gpu'

# Where .venv borrows the machine's packages, one of these tools may be on the machine's PATH instead of in .venv/bin.
in_venv := PATH="$(CURDIR)/.venv/bin:$$PATH"
lint: environment ## ruff, mypy --strict (all but the CPU tests), import layers, reachable symbols, shellcheck
	$(in_venv) ruff check .
	$(in_venv) ruff format --check .
	$(in_venv) mypy --strict src overlays/simpletuner/src
	$(in_venv) MYPYPATH=tests mypy --strict --explicit-package-bases --follow-imports=silent tests/gpu benchmarks
	$(in_venv) MYPYPATH=scripts/upstream_features:overlays/simpletuner/src mypy --strict --explicit-package-bases --follow-imports=silent scripts
	$(in_venv) MYPYPATH=tests/unit/overlays/ai_toolkit/standin mypy --strict overlays/ai_toolkit/gracetune_overlay
	$(in_venv) lint-imports
	.venv/bin/python scripts/check_reachable.py
	$(in_venv) shellcheck scripts/*.sh .ci/run

clean: ## remove .venv and everything else these targets create
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
