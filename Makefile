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

figure2: install
	$(BIN)/olmo-sparsity prepare configs/quick.yaml
	$(BIN)/olmo-sparsity train configs/quick.yaml
	$(BIN)/olmo-sparsity measure runs/quick --out results/quick --max-documents 40 \
		--selectors add_one,divergence,random,nearest,most_frequent
	$(BIN)/olmo-sparsity figure results/quick --out results/quick/figure2.png
	$(BIN)/olmo-sparsity report results/quick --out results/quick/report.html --max-documents 20

evidence: install
	scripts/evidence.sh
