# Two commands do everything on a fresh machine: `make figure2` and `make test`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install fmt check test fuzz bench figure2 evidence

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
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

test: install
	$(BIN)/pytest

fuzz: install
	$(BIN)/python -m tests.fuzz --cases 3000

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/influence.py

# The model copies (configs/repeated.yaml, configs/induction.yaml), or there would be nothing to
# measure. Both readings of "k far tokens": shown alone, and with their states in the long window.
ask := $(BIN)/olmo-sparsity measure runs/induction --long 96 --short 32 --stride 32 \
	--max-documents 60 --selectors add_one,divergence,random,nearest

figure2: install
	$(BIN)/olmo-sparsity prepare configs/quick.yaml
	$(BIN)/olmo-sparsity train configs/repeated.yaml
	$(BIN)/olmo-sparsity train configs/induction.yaml
	$(ask) --out results/isolated --far-states isolated
	$(ask) --out results/contextual
	$(BIN)/olmo-sparsity figure results/contextual results/isolated \
		--labels "with their context,shown alone" --out results/figure2.png
	$(BIN)/olmo-sparsity report results/contextual --out results/report.html --max-documents 20

evidence: install
	scripts/evidence.sh
