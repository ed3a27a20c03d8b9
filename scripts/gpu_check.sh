#!/usr/bin/env bash
# Does all of this work on the GPUs of this machine, and how fast? Ten minutes, one table:
#
#   scripts/gpu_check.sh [--out results/gpu_check] [--only pipeline,numbers,…] [--minutes 10]
#   scripts/gpu_check.sh --small      # the same checks on CPU, two minutes
#
# From a fresh clone: what is missing beside the PyTorch that is here is installed into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
needed='import torch, olmo, deepspeed, transformers, omegaconf, matplotlib, pyarrow'
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
if ! "$python" -c "$needed" >/dev/null 2>&1; then
  [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
  python=.venv/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check \
    -c <(grep -v '^torch==' constraints.txt) -e '.[train]' >&2
fi
exec "$python" benchmarks/gpu_check.py "$@"
