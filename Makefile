# One command sets everything up and runs the main job (make demo), one sets up and passes the tests (make test).
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null | grep True),$(name))))
VENV ?= .venv
# The plain name "torch" works too (it may bring gigabytes of CUDA); any build from 2.12 on does.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check lint types unit numerics k8s-tests serve-tests gpu-tests browser format clean

demo: $(VENV)/.installed
	$(BIN)/outrider fetch smollm2
	$(BIN)/outrider demo

test: $(VENV)/.installed-dev
	$(BIN)/outrider fetch smollm2
	$(BIN)/python -m pytest tests/unit -n auto
	$(BIN)/python -m pytest tests/k8s
	$(BIN)/python -m pytest tests/gpu || test $$? -eq 5
	$(BIN)/python -m pytest tests/numerics -n auto
	$(BIN)/python -m pytest tests/serve

check: lint types test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit -n auto

numerics: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/numerics -n auto

k8s-tests serve-tests gpu-tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/$(@:-tests=)

# The live page in a real Chromium, against a running server. Not part of `make test`: it needs a browser of the system.
browser: $(VENV)/.installed-dev
	$(PIP) install --editable ".[browser]"
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else echo "No Chromium was found: install it (Debian: apt-get install chromium), or these tests are skipped."; fi
	$(BIN)/outrider fetch smollm2
	$(BIN)/python -m pytest tests/browser

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install "$(TORCH)"
	$(PIP) install --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
