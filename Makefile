# make run      a real vLLM server that answers from a low-bit KV cache; make run ONCE=1 stops after the answer
# make check    two minutes: lint, types, and the quick tests that need no engine
# make test     the whole test suite
# make fuzz     random traces on real engines, every token judged: make fuzz SEED=1 MINUTES=10
# make soak     a real server under mixed load: make soak MINUTES=10
# make wheel    a wheel in dist/ that carries the compiled CPU kernels
# make site     the documents as a site in build/site
# make mutants  faults planted one at a time, each of which the tests must notice: make mutants ALL=1 for the slow ones
# make audit    known vulnerabilities of what is installed, from a public service
# make lint     ruff, clang-format and the import contracts;  make types: mypy;  make format: both rewrite the files
#
# Variables: FORMAT=kvq3|kitty2|...  PORT=8000  MODEL=path or name (default: the demo model)  ONCE=1
#            PYTHON=python3 (creates the environment)  PYTEST_ARGS="-k name"  WORKERS=2 (test processes)

PYTHON ?= python3
FORMAT ?=
PORT ?= 8000
MODEL ?=
ONCE ?=
SEED ?= 0
MINUTES ?= 10
ALL ?=
PYTEST_ARGS ?=
WORKERS ?= 2

VENV := .venv/bin
QUICK := not engine and not slow and not wide
QUICK_TESTS := tests/formats tests/eval
export VLLM_NO_USAGE_STATS = 1
export DO_NOT_TRACK = 1

.PHONY: run check test fuzz soak wheel site mutants audit lint types format bootstrap kernels clean
.DEFAULT_GOAL := run

bootstrap:
	@$(PYTHON) scripts/bootstrap.py $(AHEAD)

# they are compiled while bootstrap downloads
kernels: AHEAD := --kernels
kernels: bootstrap
	@echo "kernels: compiling csrc/cpu where it has changed (a few minutes)"
	@$(VENV)/python -m vllm_kvq.kernels

run: kernels
	@$(VENV)/python -m proof demo --port "$(PORT)" $(if $(FORMAT),--kv-cache-dtype "$(FORMAT)") \
		$(if $(MODEL),--model "$(MODEL)") $(if $(filter-out 0,$(ONCE)),--once)

check: kernels
	@$(MAKE) --no-print-directory --jobs=2 lint types
	@$(VENV)/python -m pytest -q -n $(WORKERS) -m "$(QUICK)" $(QUICK_TESTS) $(PYTEST_ARGS)

test: kernels
	@echo "test: the whole suite, see pyproject.toml for its settings"
	@$(VENV)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

fuzz soak: kernels
	@$(VENV)/python -m proof $@ --seed $(SEED) --minutes $(MINUTES)

wheel: kernels
	@$(VENV)/python scripts/build_wheel.py

site: bootstrap
	@NO_MKDOCS_2_WARNING=1 $(VENV)/python -m mkdocs build --strict
	@echo "site: open build/site/index.html; for the search: $(VENV)/python -m http.server --directory build/site"

mutants: kernels
	@$(VENV)/python -m proof mutants $(if $(filter-out 0,$(ALL)),--all)

audit: bootstrap
	@$(VENV)/python scripts/audit.py

lint: bootstrap
	@$(VENV)/python -m ruff check .
	@$(VENV)/python -m ruff format --check .
	@$(VENV)/python scripts/clang_format.py --check
	@$(VENV)/lint-imports --no-cache --no-logo

types: bootstrap
	@$(VENV)/python -m mypy

format: bootstrap
	@$(VENV)/python -m ruff check --fix .
	@$(VENV)/python -m ruff format .
	@$(VENV)/python scripts/clang_format.py

clean:
	rm -rf .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
