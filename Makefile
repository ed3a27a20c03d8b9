# Two commands do everything on a fresh machine: `make figure2` and `make test`.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install fmt check test fuzz faults bench docs figure2 evidence

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

# A process for each core, each with one thread. The tests of a file share what they prepare, and
# those that wait (integration/) begin.
test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

fuzz: install
	$(BIN)/python -m tests.fuzz --cases 3000

faults: install
	$(BIN)/python -m tests.faults --damages 2700 --kills 300 --races 60

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/influence.py

docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The model copies (configs/repeated.yaml, configs/induction.yaml), or there would be nothing to
# measure. Both readings of "k far tokens": shown alone, and with their states in the long window;
# single tokens, and every run of four.
ask := $(BIN)/olmo-sparsity measure runs/induction --long 96 --short 32 --stride 32 \
	--max-documents 60 --units tokens,span:4 --selectors add_one,random --ks 1,2,4,8

# Side by side: a second thread makes one measurement of a model this small hardly faster.
readings := results/isolated results/contextual
.PHONY: $(readings)
$(readings): results/%:
	set -o pipefail; $(ask) --out $@ --far-states $* 2>&1 | sed -u 's/^/$*: /'

figure2: install
	$(BIN)/olmo-sparsity prepare configs/quick.yaml
	$(BIN)/olmo-sparsity train configs/repeated.yaml
	$(BIN)/olmo-sparsity train configs/induction.yaml
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$((($$(nproc) + 1) / 2))} $(MAKE) --jobs=2 $(readings)
	$(BIN)/olmo-sparsity figure results/contextual results/isolated \
		--labels "with their context,shown alone" --out results/figure2.png
	$(BIN)/olmo-sparsity report results/contextual --out results/report.html --max-documents 20
	$(BIN)/olmo-sparsity explain runs/induction --text docs/examples/hospital.txt --at Hartsfield \
		--units words -k 2 --check --html results/explain.html

# The other parts: configs/experiments/evidence.yaml.
evidence: install
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(BIN)/olmo-sparsity sweep configs/experiments/evidence.yaml
	$(BIN)/python docs/write_tables.py
