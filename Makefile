# The one entry point. Everything that a target needs it installs itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
MODELS := $(VENV)/.installed-models
MOCK   := tests/adapters/mock
DEMO   ?= .demo
PORT   ?= 8787

.PHONY: demo test lint types first second unit proof long long-proof long-kills js bench bench-peer coverage mutants fuzz clean

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Culet needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(DEV): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(STAMP)

$(MODELS): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[openai,anthropic]'
	@touch $@ $(STAMP)

# With a key in the environment the demo thinks with that model.
demo: $(STAMP) $(if $(OPENAI_API_KEY)$(ANTHROPIC_API_KEY),$(MODELS))
	$(BIN)/culet demo --data $(DEMO) --port $(PORT) $(if $(DOCS),--docs "$(DOCS:~/%=$(HOME)/%)")

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy
	$(BIN)/pyright

# How much a proof plays is one profile: tests/volume.py. With CI set it is `ci`, else
# `short`. Two processes run the tests side by side. The first has those that wait for
# servers, node and a browser, the second those that only compute. Where the proofs are
# large they fill the second one alone.
SERVED  := tests/attack tests/bench tests/demo tests/docs tests/kill tests/web
PROFILE := $(or $(CULET_PROFILE),$(if $(CI),ci,short))
ifeq ($(PROFILE),short)
FIRST  := $(SERVED)
SECOND := $(SERVED:%=--ignore=%)
ORDER  := lint first second types
else
FIRST  := -m 'not proof'
SECOND := -m proof
ORDER  := second lint types first
endif

test:
	+$(MAKE) -j2 --no-print-directory $(ORDER)

first: $(DEV) js
	$(BIN)/python -m pytest $(FIRST)

second: $(DEV) $(if $(filter short,$(PROFILE)),$(MOCK)/node_modules/.stamp)
	nice $(BIN)/python -m pytest $(SECOND) -o faulthandler_timeout=600 --durations=10 >.second.log 2>&1; \
	status=$$?; echo 'the second process:'; cat .second.log; exit $$status

unit: $(DEV) js
	$(BIN)/python -m pytest -m 'not proof'

proof: $(DEV)
	CULET_PROFILE=ci $(BIN)/python -m pytest -m proof

# Hours of it, with lines of progress on stderr, which is therefore not captured.
LONG := -x --capture=sys -o faulthandler_timeout=0
long: $(DEV)
	+$(MAKE) -j2 --no-print-directory long-proof long-kills

long-proof: $(DEV)
	CULET_PROFILE=long $(BIN)/python -m pytest $(LONG) -m proof

long-kills: $(DEV)
	CULET_PROFILE=long $(BIN)/python -m pytest $(LONG) tests/kill/test_kill.py

js: tests/js/node_modules/.stamp tests/js/older/node_modules/.stamp tests/js/.chromium $(MOCK)/node_modules/.stamp

tests/js/node_modules/.stamp: tests/js/package.json tests/js/package-lock.json web/js/package.json $(wildcard web/js/src/*)
	cd tests/js && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

tests/js/older/node_modules/.stamp: tests/js/older/package.json tests/js/older/package-lock.json
	cd tests/js/older && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

$(MOCK)/node_modules/.stamp: $(MOCK)/package.json $(MOCK)/package-lock.json
	cd $(MOCK) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# A browser for one test. Root on Debian gets it from the packages; elsewhere that test says why it is skipped.
tests/js/.chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || echo "no chromium: the browser test will be skipped"
	@touch $@

bench: $(DEV)
	$(BIN)/python tests/bench/local.py $(BENCH)
	$(BIN)/python tests/bench/scale.py $(SCALE)
	$(BIN)/python tests/bench/runs.py $(RUNS_BENCH)
	$(BIN)/python tests/bench/crowd.py $(CROWD)

bench-peer: $(DEV)
	tests/bench/peer/run.sh

# Branch coverage. By their own tests alone: the five files that decide how things end,
# and the storage package. Then kernel, adapters and web by all tests, which takes long.
FIVE := kernel/culet/kernel/core/status.py,kernel/culet/kernel/core/job.py,kernel/culet/kernel/core/frames.py,kernel/culet/kernel/core/reducer.py,kernel/culet/kernel/core/path.py
OWN := tests/core tests/storage tests/kernel/test_quota.py
COVERED := $(BIN)/coverage run --data-file=$(CURDIR)/.coverage -m pytest
COVERAGE := $(BIN)/coverage report --data-file=$(CURDIR)/.coverage --skip-covered -m
coverage: $(DEV) js
	$(BIN)/coverage erase --data-file=$(CURDIR)/.coverage
	$(COVERED) $(OWN)
	$(BIN)/coverage combine -q --data-file=$(CURDIR)/.coverage
	$(COVERAGE) --include='$(FIVE)' --fail-under=100
	$(COVERAGE) --include='storage/*' --fail-under=100
	$(COVERED) $(OWN:%=--ignore=%)
	$(BIN)/coverage combine -q --append --data-file=$(CURDIR)/.coverage
	$(COVERAGE) --include='kernel/*' --fail-under=95
	$(COVERAGE) --include='adapters/*' --fail-under=95
	$(COVERAGE) --include='web/*' --fail-under=95

# Makes those five files wrong in one place at a time; MUTANTS="path --at-least 90".
mutants: $(DEV)
	$(BIN)/python tests/mutants $(MUTANTS)

fuzz: $(DEV)
	$(BIN)/python -m fuzz $(FUZZ)

clean:
	rm -rf $(VENV) .demo tests/js/node_modules tests/js/.chromium $(MOCK)/node_modules
