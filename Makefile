# One entry per task; CI calls the same ones. Each sets up .venv by itself and needs only make and Python 3.11+.
#   make demo [ARGS="--duration 20s"]     make test [PYTEST_ARGS="-k dcgm"]     make check | bench | goldens | clean
VENV := .venv
BIN := $(VENV)/bin
# PYTHON=... names the interpreter for .venv; without it the first of these that is new enough is taken.
CANDIDATES = $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python)
SOURCES = $(wildcard gpulens tests bench .ci/*.py)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements-dev.txt
ARGS ?=
PYTEST_ARGS ?=

.PHONY: demo test check docs-check bench goldens clean
.DEFAULT_GOAL := demo

demo: $(VENV)/run.stamp
	@$(BIN)/gpulens demo $(ARGS)

test: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS)

check: $(VENV)/dev.stamp docs-check
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/ruff format --quiet --check $(SOURCES) || \
	  { echo "some files are not formatted: run $(BIN)/ruff format $(SOURCES)" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary $(SOURCES)
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log >&2; exit 1; }
	@echo "check: lint, format, types, import rules and generated docs are fine"

# Generated pages must be what their generator writes now.
docs-check: $(VENV)/dev.stamp
	@if [ -f gpulens/pipeline/docs.py ]; then $(BIN)/python -m gpulens.pipeline.docs --check; fi

bench: $(VENV)/dev.stamp
	@set -e; found=; for script in bench/*.py; do \
	  case "$$script" in 'bench/*.py'|*/__init__.py) continue;; esac; \
	  found=1; echo "== $$script"; $(BIN)/python "$$script"; \
	done; \
	[ -n "$$found" ] || { echo "bench/ holds no scripts" >&2; exit 1; }

goldens: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q --update-goldens $(PYTEST_ARGS)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find gpulens tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created.stamp:
	@set -e; bare=; \
	for python in $(CANDIDATES); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  "$$python" -c 'import ensurepip, venv' 2>/dev/null || { bare=$$python; continue; }; \
	  echo "setting up $(VENV) with $$("$$python" --version) (once)"; \
	  "$$python" -m venv --clear $(VENV); touch $@; exit 0; \
	done; \
	if [ -n "$$bare" ]; then \
	  echo "$$bare has no venv and ensurepip modules; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	else \
	  echo "Python 3.11 or newer is needed; looked for: $(CANDIDATES). Name one with make PYTHON=/path/to/python3 ..." >&2; \
	fi; exit 1

$(VENV)/run.stamp: $(VENV)/created.stamp pyproject.toml requirements-dev.txt
	@$(INSTALL) --editable ".[nvidia]"
	@touch $@

# The peers (real third-party programs) have no wheel on some platforms: without one their tests are skipped.
$(VENV)/dev.stamp: $(VENV)/created.stamp pyproject.toml requirements-dev.txt
	@echo "installing what the tests and checks need (once)"
	@$(INSTALL) --editable '.[dev]'
	@$(INSTALL) --editable '.[peers]' --only-binary rotel 2>$(VENV)/peers.log || \
	  echo "rotel can't be installed here (see $(VENV)/peers.log): tests that need it are skipped" >&2
	@touch $(VENV)/run.stamp $@
