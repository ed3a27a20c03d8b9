# shellcheck shell=bash
# What the jobs of this folder share; sourced by them. `run COMMAND…` starts `olmo-sparsity COMMAND…`
# once for every task of the job, then decides whether the job goes back into the queue:
#
#   exit code of the command            what happens
#   0  finished                         nothing
#   2  something you can mend           nothing; the log says what
#   75 saved and left when asked        requeued: the same command goes on where it stopped
#   anything else: crash, lost task     requeued
#
# A job that dies more than OLMO_SPARSITY_MAX_RESTARTS times (5), or is stopped four times as often,
# stays. A command that gets on (a training that saves 100 steps or 10 minutes beyond the beginning
# of its start, a measurement that finishes a document) removes slurm/logs/.deaths-JOB, in which
# both are counted, so a long job may die more often.
#
# (A training that dies again and again without getting on refuses to start, which is a 2.)
#
# SLURM itself requeues a job that it preempts or that loses a node, and never one that you cancel.
#
# From the environment: OLMO_SPARSITY_SRUN_FLAGS="--container-image=… --cpu-bind=…", further flags
# of srun; OMP_NUM_THREADS; HF_HUB_OFFLINE=0, to download what is not in the cache; GLOO_SOCKET_IFNAME,
# without which each process chooses the interface of its own node (training/interface.py).

if [[ ! -f $SLURM_SUBMIT_DIR/slurm/job.sh ]]; then
  echo "submit from the root of olmo-sparsity, not from $SLURM_SUBMIT_DIR" >&2
  exit 2
fi
cd "$SLURM_SUBMIT_DIR" || exit 2
[[ -d .venv/bin ]] && PATH="$PWD/.venv/bin:$PATH"

# Sent to the shell only when SLURM itself ends the job (scancel, preemption, requeue, time limit):
# the processes get it too and save. SLURM decides where the job goes next, but a time limit ends it
# for good. That is so if a save took longer than the time that --signal leaves for it.
ended_by_slurm() {
  ended=yes interrupted=yes
  if [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" Reason=TimeLimit "* ]]; then
    requeue "time limit while saving"
  fi
}
trap ended_by_slurm TERM

run() {
  log "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST," \
    "code $(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)"
  log "olmo-sparsity ${*@Q}"
  environment
  # When a training loses a task, the others leave with 76, or are taken down 60 s later; not at
  # once, or a task about to leave with 2 or 75 would be killed and look like a crash. The first task
  # waits 30 s for the parts of others (PATIENCE_S of checkpoint.py). The tasks of a measurement do
  # not need each other.
  local status=0 wait=60
  [[ $1 == measure || "$*" == experiment\ *--only=*[!0-9]* ]] && wait=0
  # In the background, as bash handles TERM only between commands: SLURM kills it soon after.
  # shellcheck disable=SC2086 # it holds several words
  srun --kill-on-bad-exit=0 --wait="$wait" ${OLMO_SPARSITY_SRUN_FLAGS:-} olmo-sparsity "$@" &
  local tasks=$!
  wait "$tasks" || status=$?
  while [[ -n ${interrupted:-} ]]; do # it was TERM that ended `wait`
    interrupted='' status=0
    wait "$tasks" || status=$?
  done
  # SLURM signals the tasks first: they may have left before this shell is told.
  [[ $status == 0 || $status == 2 ]] || { sleep 3 & wait "$!"; } || true
  if [[ -n ${ended:-} ]]; then # srun may then say 0 of tasks that never finished
    log "ended by SLURM"
  elif [[ $status == 0 ]]; then
    log "finished"
  elif [[ $status == 2 ]]; then
    log "not requeued: mend what is said above, then submit again"
  elif [[ $status == 75 || $status == 140 ]]; then # 140: USR2 came before anything could be saved
    requeue_unless stopped $((4 * max_restarts)) "stopped when asked"
  else
    requeue_unless dead "$max_restarts" "exit code $status"
  fi
  return "$status"
}

# For the processes of the job.
environment() {
  export OLMO_SPARSITY_DEATHS="$PWD/slurm/logs/.deaths-$SLURM_JOB_ID"
  # This shell runs on the job's first node, and so does rank 0. The rest of what a process must know
  # (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) it takes from srun's variables: launch.py.
  export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
  MASTER_ADDR=$(hostname)
  # srun takes --cpus-per-task over from sbatch only so, and without it gives a task one core.
  local cores=${SLURM_CPUS_PER_TASK:-$(cores_per_task)}
  export SRUN_CPUS_PER_TASK=$cores OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
  # Without it, a node that has no internet waits for the hub before it looks into the cache.
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
}

# The job's cores on a node, shared by its tasks there; 1 where nodes differ.
cores_per_task() {
  local tasks=${SLURM_TASKS_PER_NODE:-1} cores=${SLURM_JOB_CPUS_PER_NODE:-1}
  [[ $tasks$cores == *,* ]] && tasks=1 cores=1 # as 4(x2),3
  tasks=${tasks%(*} cores=${cores%(*}
  echo $((cores > tasks ? cores / tasks : 1))
}

max_restarts=${OLMO_SPARSITY_MAX_RESTARTS:-5}

# requeue_unless HOW MOST REASON: requeue this job, unless it has ended so more than MOST times since
# its command last got on. Preemptions are not counted, so SLURM_RESTART_COUNT does not tell.
requeue_unless() {
  echo "$1" >>"$OLMO_SPARSITY_DEATHS"
  if (($(grep -c "^$1\$" "$OLMO_SPARSITY_DEATHS") <= $2)); then
    requeue "$3"
  else
    log "$3: not requeued after $2 restarts without getting on; find the cause above"
  fi
}

requeue() {
  log "$1: requeued"
  scontrol requeue "$SLURM_JOB_ID" || log "… but not here: submit the same command again to go on"
}

log() {
  echo "[$(date --utc +%Y-%m-%dT%H:%M:%SZ)] $*"
}
