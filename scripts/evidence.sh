#!/usr/bin/env bash
# The measurements and figures of the report, from a clean state: `make evidence`, three to four hours
# on 2 cores. Each step is one command of the pipeline and can be killed: what it finished is kept, the
# same command goes on, and a step that is done costs seconds.
#
#   scripts/evidence.sh            text and tasks
#   scripts/evidence.sh text       Figure 2 with and without copying, its stages, ground truth
#   scripts/evidence.sh tasks      the synthetic tasks, the theory
#   scripts/evidence.sh long       the rest of the report, hours more: the ladder of sizes, PoSE beyond
#                                  the training length, models that do not copy, ablations, PoSE
#                                  against RoPE over five seeds, the theory's bridge
#   scripts/evidence.sh reviews    the claim on film reviews, which are to lie in data/imdb
#   scripts/evidence.sh gpu        models of web text, trained here and published: a GPU, the hub, about
#                                  a day. Not run yet.
#
# What is quoted lands in docs/results and docs/figures, and from there in the tables of the pages; tests
# hold the tables to it.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
all="add_one,divergence,random,nearest,most_frequent"
six=(--seeds=[31,32,33,34,35,36] --training.num_steps=2000)
growing=("${six[@]}" --training.grow_k_steps=400)
number=0

step() {
  number=$((number + 1))
  echo "[$(date +%H:%M:%S)] step $number: $*"
  "$@"
}

# Summary, mean losses, kinds of dependency and provenance of a measurement, in text that a reader
# can diff; of a headline also the rows of its targets, from which all of it can be made again.
keep() { # folder under results/, its name in the report where that is another, rows (or nothing)
  python - "${3:-}" "results/$1" "docs/results/measurements/${2:-$1}" <<'PYTHON'
import shutil, sys
from pathlib import Path
import pandas as pd
source, kept = map(Path, sys.argv[2:])
kept.mkdir(parents=True, exist_ok=True)
for name in ("summary", "dependencies"):
    pd.read_parquet(source / f"{name}.parquet").round(4).to_csv(kept / f"{name}.csv", index=False)
losses = pd.read_parquet(source / "losses.parquet")[["loss_short", "loss_long"]]
losses.agg(["mean", "count"]).round(4).to_csv(kept / "losses.csv")
shutil.copy(source / "meta.json", kept)
if sys.argv[1] == "rows":
    for name in ("losses", "targets", "recovery", "influence"):
        rows = pd.read_parquet(source / f"{name}.parquet")
        if "selector" in rows:
            rows = rows[rows.selector == "add_one"]
        if name == "influence":
            rows = rows[(rows.control == "own") & (rows["rank"] <= 4)]
        rows.to_parquet(kept / f"{name}.parquet", compression="zstd", index=False)
PYTHON
}

task() { # PRESET, or NAME PRESET and what is different
  local name=$1 preset=${2:-$1}
  shift $(($# > 1 ? 2 : 1))
  [[ $name == "$preset" ]] || set -- "$@" --output="runs/tasks/$name"
  step olmo-sparsity task "configs/tasks/$preset.yaml" "$@"
  mkdir -p "docs/results/tasks/$name"
  cp "runs/tasks/$name"/{accuracy.parquet,meta.json} "docs/results/tasks/$name"
  olmo-sparsity figure "docs/results/tasks/$name" --out "docs/figures/$name.png"
}

# Every model of a sweep in one table and figure.
rungs() { # the sweep's folder under runs/, the reading, k of the figure, further options
  local sweep=$1 far=$2 k=$3 run
  shift 3
  for run in runs/"$sweep"/*/; do
    step olmo-sparsity measure "$run" --short 32 --long 96 --stride 32 --max-documents 60 \
      --selectors add_one,random --ks 1,2,4,8 --far-states "$far" "$@" \
      --out "results/${sweep}_$far/$(basename "$run")"
  done
  olmo-sparsity ladder results/"$sweep"_"$far"/* --k "$k" --out "docs/figures/${sweep}_$far.png"
}

text() {
  # Figure 2 of a model that copies.
  step make figure2
  cp results/figure2.png docs/figures/figure2.png
  cp results/report.html docs/figures/figure2.html
  cp results/contextual/meta.json docs/figures/figure2.meta.json # command, commit, machine
  chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,760 \
    --screenshot=docs/figures/explain.png results/explain.html # README's picture
  step python docs/write_notebook.py
  keep isolated net_figure2_isolated rows

  # With more documents, and beside it a model of the same size that does not copy.
  step olmo-sparsity train configs/quick.yaml
  windows=(--long 96 --short 32 --stride 32 --max-documents 120)
  for far in contextual isolated; do
    step olmo-sparsity measure runs/induction "${windows[@]}" --selectors "$all" \
      --far-states $far --out results/induction_$far
    step olmo-sparsity measure runs/quick "${windows[@]}" --selectors add_one,random,nearest \
      --far-states $far --targets results/induction_$far --out results/no_induction_$far
    # Against the placebo, tokens and spans; the rows of their targets are kept.
    step olmo-sparsity measure runs/induction "${windows[@]}" --units tokens,span:4 \
      --selectors add_one,random --ks 1,2,4,8 --far-states $far --out results/net_induction_$far
    step olmo-sparsity measure runs/quick "${windows[@]}" --units tokens,span:4 --selectors add_one \
      --ks 1,4,8 --far-states $far --out results/net_no_induction_$far
    keep net_induction_$far "" rows
    keep net_no_induction_$far "" rows
  done
  for name in {,no_}induction_{contextual,isolated}; do keep $name; done
  olmo-sparsity figure results/net_induction_contextual --out docs/figures/net_induction_contextual.png

  # Before, while and after copying is learnt.
  step olmo-sparsity sweep configs/sweeps/stages_school.yaml
  step olmo-sparsity sweep configs/sweeps/stages.yaml
  rungs stages contextual 1
  for seed in 1 2 3; do keep stages_contextual/induction_600_seed$seed stages_600_seed$seed; done

  # Ground truth.
  step olmo-sparsity prepare configs/planted.yaml
  step olmo-sparsity train configs/planted.yaml
  for far in contextual isolated; do
    step olmo-sparsity measure runs/planted --planted --long 60 --short 16 --ks 1,2,4,8 \
      --selectors add_one,add_one_screened,drop_one,divergence,gradient,attention,nearest,random \
      --max-documents 160 --far-states $far --out results/planted_$far
    keep planted_$far
  done
}

tasks() {
  task scratchpad_parity_quick
  task scratchpad_parity_unscaled scratchpad_parity_quick --schemes=[ppc] --model.query_scale_length=null
  task scratchpad_parity_solved scratchpad_parity_quick --schemes=[rope,pose] \
    --model.init_std=0.1 --training.lengths_per_batch=8 --training.num_steps=6000
  task sparse_parity_quick
  task sparse_parity_k_train sparse_parity_quick --seeds=[41,42,43] --train_ks=[2,6] --test_ks=[2,4,6,8,12]
  task sparse_parity_2000 sparse_parity_quick "${growing[@]}"
  task needle_quick
  task variable_assignment_quick variable_assignment_quick --schemes=[ppc,pose]
  task addition_quick

  step olmo-sparsity theory configs/theory/quick.yaml
}

long() {
  step olmo-sparsity prepare configs/quick.yaml
  # Four sizes, with and without PoSE, three seeds.
  step olmo-sparsity sweep configs/sweeps/ladder_school.yaml
  step olmo-sparsity sweep configs/sweeps/ladder.yaml
  rungs ladder isolated 8 --dtype bf16 # the same numbers within a hundredth
  rungs ladder contextual 1 --dtype bf16
  for run in runs/ladder/induction_1.2M_*; do # … and to twice the training length
    step olmo-sparsity measure "$run" --short 32 --long 224 --stride 32 --max-documents 240 --dtype bf16 \
      --selectors add_one,random --ks 1,2,4,8 --out "results/beyond/$(basename "$run")"
  done
  olmo-sparsity ladder results/beyond/* --k 1 --out docs/figures/beyond_contextual.png
  # Models that do not copy: exact windows, PoSE and RoPE alone on the same targets, inside and beyond
  # the training length.
  step olmo-sparsity train configs/quick.yaml
  step olmo-sparsity measure runs/quick --selectors "$all" --max-documents 120 --far-states isolated \
    --out results/quick_exact_128
  keep quick_exact_128
  step olmo-sparsity train configs/quick.yaml --positions.scheme=contiguous \
    --positions.target_length=null --evaluation.length=256 --run_folder=runs/quick_rope
  windows=(--short 32 --stride 32 --max-documents 240 --selectors "$all" --far-states isolated)
  step olmo-sparsity measure runs/quick --out results/quick_pose_256 --long 224 "${windows[@]}"
  targets=(--targets results/quick_pose_256)
  step olmo-sparsity measure runs/quick_rope --out results/quick_rope_256 --long 224 "${targets[@]}" "${windows[@]}"
  step olmo-sparsity measure runs/quick --out results/quick_pose_128 --long 96 "${targets[@]}" "${windows[@]}"
  step olmo-sparsity measure runs/quick_rope --out results/quick_rope_128 --long 96 "${targets[@]}" "${windows[@]}"
  for name in quick_{pose,rope}_{128,256}; do keep $name; done
  task scratchpad_parity_gpt_neox scratchpad_parity_quick --schemes=[ppc,pose] \
    --model.architecture=gpt_neox --model.query_scale_length=null
  task variable_assignment_given variable_assignment_quick --schemes=[coupled,rope]
  # Each departure from the paper taken back alone.
  task sparse_parity_2_chunks sparse_parity_quick --schemes=[pose] "${growing[@]}" --positions.num_chunks=2
  task sparse_parity_unscaled sparse_parity_quick --schemes=[pose] "${growing[@]}" --model.query_scale_length=null
  task sparse_parity_any_cuts sparse_parity_quick --schemes=[pose] "${growing[@]}" --positions.aligned_cuts=false
  task sparse_parity_growing sparse_parity_quick --seeds=[37,38,39] --training.grow_k_steps=400
  task sparse_parity_all_k_at_once sparse_parity_quick --schemes=[pose] "${six[@]}"
  task sparse_parity_1_chunk sparse_parity_quick --schemes=[pose] "${six[@]}" --positions.num_chunks=1
  task sparse_parity_4_layers sparse_parity_quick --schemes=[pose] "${six[@]}" --model.n_layers=4
  olmo-sparsity figure docs/results/tasks/sparse_parity_{2000,2_chunks,unscaled,any_cuts,all_k_at_once} \
    --labels "growing k,two chunks,queries unscaled,cuts anywhere,all k at once" \
    --out docs/figures/sparse_parity_ablations.png
  step python benchmarks/pose_pays.py
  step olmo-sparsity theory configs/theory/bridge.yaml
}

reviews() {
  step olmo-sparsity prepare configs/quick.yaml
  for seed in 6 7 8; do # the models of 2.7M parameters
    step olmo-sparsity sweep configs/sweeps/ladder_school.yaml --only $seed
  done
  step olmo-sparsity prepare configs/induction.yaml --data.folder=data/reviews \
    --data.corpus.source=c4_files --data.corpus.path="data/imdb/*.json.gz"
  step olmo-sparsity sweep configs/sweeps/reviews.yaml
  rungs reviews contextual 8 --dtype bf16
  for seed in 1 2 3; do
    for text in repeats running; do
      keep reviews_contextual/induction_${text}_seed$seed reviews_${text}_seed$seed
    done
  done
}

gpu() {
  step olmo-sparsity prepare configs/c4_60m_pose.yaml # 25M documents; shared by both
  windows=(--short 128 --stride 32 --max-documents 2000 --selectors "$all" --ks 1,2,4,8,16,32)
  for positions in rope pose; do
    step torchrun --nproc_per_node=gpu scripts/train.py "configs/c4_60m_$positions.yaml"
    for long in 1024 2048; do # the training length, and twice that
      step olmo-sparsity measure "runs/c4_60m_$positions" --long $long "${windows[@]}" \
        --out "results/c4_60m_${positions}_$long"
      keep "c4_60m_${positions}_$long"
    done
  done
  for size in 160m 410m 1.4b; do # published: what their own training has taught them
    step olmo-sparsity measure "EleutherAI/pythia-$size" --text c4 --long 1024 "${windows[@]}" \
      --dtype bf16 --out "results/pythia_$size"
    keep "pythia_$size"
  done
}

parts=("$@")
[[ $# -gt 0 ]] || parts=(text tasks)
for part in "${parts[@]}"; do
  [[ $part =~ ^(text|tasks|long|reviews|gpu)$ ]] || { echo "$part is not one of text, tasks, long, reviews, gpu" >&2; exit 2; }
done
for part in "${parts[@]}"; do "$part"; done
python docs/write_tables.py
echo "[$(date +%H:%M:%S)] done: git diff docs/ shows what changed"
