# Everything is set up from a fresh checkout by these targets; they need Python 3.11-3.13 with venv, make and g++.
#   make demo   a real model on split pools, asked over HTTP and gRPC
#   make test   all CPU tests        make unit   those without a cluster
#   make check  format, lint, types, imports, unit tests     make lint   without the tests
#   make aot    the Triton kernels compiled for four GPU architectures, without a GPU, and what came of them
#   make gpu-dry-run  the run for a GPU on a CPU, in Triton's interpreter: tries the code, measures nothing
#   make chaos  200 faults on a real cluster under load, and of links and hosts where that is allowed: half an hour
#   make docs-check  the Python blocks of docs/attention.md, and whether they print what stands there
#   make native the C++ kernels again, all of them; the other targets do it where a source has changed
# PIP_ARGS is handed to pip, for example to choose PyTorch's CPU build on a machine without a GPU.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
IN_PARALLEL := $(BIN)/pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal
UNIT := $(IN_PARALLEL) tests/unit
FOLDERS := cluster replicas kv_manager kernels protos
# Stands for all of the native libraries: every machine has it, and they are built together
NATIVE := kernels/native_generic.so
BUILD_NATIVE = $(BIN)/python setup.py -q build_ext --inplace

.PHONY: demo test unit lint check aot gpu-dry-run chaos docs-check fuzz native format protos dev clean
.DELETE_ON_ERROR:

# Without g++ a demo runs on torch and says so; what passes no test must not look tested
test unit check chaos native: export BIFOLIO_REQUIRE_NATIVE := 1

demo: .venv/.installed $(NATIVE)
	@$(BIN)/bifolio models pull smollm2-135m
	@$(BIN)/bifolio demo

test: unit
	$(IN_PARALLEL) tests/interpreted
	$(IN_PARALLEL) tests/native tests/packaging tests/commands
	$(BIN)/pytest tests/cluster

unit: dev $(NATIVE)
	$(UNIT)

check: lint unit

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=.dev $(BIN)/lint-imports

aot: dev
	$(BIN)/python -P benchmarks/aot.py

gpu-dry-run: dev
	PYTHON=$(BIN)/python benchmarks/gpu.sh --cpu-interpreter

chaos: dev $(NATIVE)
	$(BIN)/python -P benchmarks/chaos.py
	$(BIN)/python -P benchmarks/chaos_hosts.py || test $$? -eq 3  # where there are no network namespaces

docs-check: dev $(NATIVE)
	$(BIN)/python -P benchmarks/docs_check.py

fuzz: dev
	BIFOLIO_FUZZ_STEPS=20000 BIFOLIO_FAULT_SCHEDULES=5000 $(BIN)/pytest -q \
	  tests/unit/kv_manager/test_ledger_machine.py tests/unit/kv_manager/test_faults.py

native: dev
	$(BUILD_NATIVE) --force

# pip built them when it installed; this is for sources that have changed since
$(NATIVE): setup.py $(wildcard kernels/native/*.h kernels/native/*.cpp) | .venv/.installed
	@$(BUILD_NATIVE)

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# protoc writes through the links in .dev, so that the generated code says `from bifolio.protos import ...`
protos: dev
	$(BIN)/python -m grpc_tools.protoc -Ibifolio/protos=protos --python_out=.dev --pyi_out=.dev \
	  --grpc_python_out=.dev bifolio/protos/inference.proto bifolio/protos/kv.proto
	rm -f protos/kv_pb2_grpc.py

dev: .venv/.installed-dev .dev/.linked

.venv/.installed: pyproject.toml setup.py
	@echo "installing Bifolio into .venv (the first time takes some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on $(PIP_ARGS) -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on $(PIP_ARGS) -e ".[dev]"
	@touch $@

# Type checkers and import-linter read the folders under their import names through these links
.dev/.linked: Makefile
	@mkdir -p .dev/bifolio
	@for folder in $(FOLDERS); do ln -sfn ../../$$folder .dev/bifolio/$$folder; done
	@touch $@

clean:
	rm -f kernels/native_*.so
	rm -rf .venv .dev build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
