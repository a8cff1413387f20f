# `make demo` and `make test` create their environment in .venv on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when first imported: compiling all of torch's beforehand takes longer than the demo.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(PIP) --constraint constraints.txt

# One worker per core; a worker takes up to 4 GB.
WORKERS ?= --numprocesses auto --maxprocesses 8 --dist worksteal

# Kernels that tests compile are kept until something changes that decides their code: the first run compiles
# all of them, in one of its processes each. FA4FLEX_CACHE=0 compiles in every process what it needs.
test exhaustive clients: export FA4FLEX_CACHE_DIR ?= $(abspath $(VENV))/kernels

# Tests start processes, and each would compile all of torch anew where Python is told to write no bytecode.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
endif

# One in so many of the slow tests runs, others each time; SLOW=1 runs all of them.
SLOW ?= 6

# Compilers and simulated programs take and return memory all the time. In large pages, and kept rather than
# returned to the system, it costs two in five page faults fewer and about a tenth less time.
MALLOC := glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4000000000:glibc.malloc.mmap_threshold=33554432
test exhaustive: export GLIBC_TUNABLES ?= $(MALLOC)

.PHONY: demo test exhaustive lint docs clients clean

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[transformers]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.demo $(VENV)/.docs

# The oldest transformers that is supported, and the oldest whose continuous batching is: tests run with these, too.
$(VENV)/.older: $(VENV)/.torch constraints.txt Makefile
	rm -rf $(VENV)/transformers
	grep -v '^transformers' constraints.txt > $(VENV)/constraints.txt
	for version in 5.5.4 5.19.0; do $(PIP) --constraint $(VENV)/constraints.txt \
		--target $(VENV)/transformers/$$version transformers==$$version || exit; done
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m fa4flex demo

test: $(VENV)/.dev $(VENV)/.older lint
	$(BIN)/python -m pytest $(WORKERS) --slow-one-in $(SLOW)

# What `make test` takes a sample of: the forward kernel of every variant at every head width.
exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest $(WORKERS) -m exhaustive

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Real engines that serve with fa4flex on a CPU, and the oldest, pinned and newest transformers: prints a table.
# It installs vLLM and SGLang into environments of their own: 10 GB in all. CLIENTS_ONLY=vllm runs one of them.
CLIENTS ?= .venv-clients
CLIENTS_ONLY ?= vllm,sglang,transformers
clients: $(VENV)/.dev
	$(BIN)/python scripts/clients $(CLIENTS) --only $(CLIENTS_ONLY)

# The site, in build/documentation/html: pages, API reference, gallery, notebooks that run; a broken link fails.
docs: $(VENV)/.docs
	$(BIN)/python scripts/documentation

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
