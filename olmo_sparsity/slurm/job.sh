# shellcheck shell=bash
# What the jobs of this folder share; sourced by them. `run COMMAND…` starts `olmo-sparsity COMMAND…`
# once for every task of the job, then decides whether the job goes back into the queue:
#
#   exit code of the command            what happens
#   0  finished                         nothing
#   2  something you can mend           nothing; the log says what
#   74 a disk is away, or full          requeued, to start after 12 minutes
#   75 saved and left when asked        requeued: the same command goes on where it stopped
#   anything else: crash, lost task     requeued, without the node at which it failed if that is known
#
# A job that dies more than OLMO_SPARSITY_MAX_RESTARTS times (5), or is stopped four times as often,
# stays. A command that gets on (a training that saves 100 steps or 10 minutes beyond the beginning
# of its start, a measurement that finishes a document) removes slurm/logs/.deaths-JOB, in which
# both are counted, so a long job may die more often. (A training that dies again and again without
# getting on refuses to start, which is a 2.)
#
# Which node failed is known if the processes have named it, because they waited for it or because its
# weights differ from those of all others (then it is in slurm/logs/.suspect-JOB: watchdog.py,
# replicas.py), or if tasks of one node alone crashed and the others say that they lost a process. At most OLMO_SPARSITY_MAX_EXCLUDED nodes (2) are excluded.
#
# SLURM itself requeues a job that it preempts or that loses a node, and never one that you cancel.
#
# From the environment: OLMO_SPARSITY_SRUN_FLAGS="--container-image=… --cpu-bind=…", further flags
# of srun; OMP_NUM_THREADS; HF_HUB_OFFLINE=0, to download what is not in the cache; GLOO_SOCKET_IFNAME,
# without which each process chooses the interface of its own node (training/processes/network_interface.py).

cd "$SLURM_SUBMIT_DIR" || exit 2
[[ -d .venv/bin ]] && PATH="$PWD/.venv/bin:$PATH"

# whole_number VARIABLE DEFAULT: prints the number that a variable of the environment holds. Refused
# here, as a job that bash cannot count for is not requeued, days later. 08 would be octal.
whole_number() {
  local value=${!1:-$2}
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]]; then
    echo "$1=$value must be a whole number, such as $2, without sign, point or leading zeros" >&2
    return 1
  fi
  echo "$value"
}
max_restarts=$(whole_number OLMO_SPARSITY_MAX_RESTARTS 5) || exit 2
max_excluded=$(whole_number OLMO_SPARSITY_MAX_EXCLUDED 2) || exit 2

# Seconds after the exit of the first task at which srun ends the others. When a training loses a
# task, the others leave with 76; not at once, or a task about to leave with 2 or 75 would be killed
# and look like a crash. The first task waits 30 s for the parts of others (PATIENCE_S of
# checkpoints/writer.py), and a time-out is reported within 30 s (DISK_PATIENCE_S of watchdog.py).
seconds_after_first_exit=60

# Sent to the shell only when SLURM itself ends the job (scancel, preemption, requeue, time limit):
# the processes get it too and save. SLURM decides where the job goes next, but a time limit ends it
# for good. That is so if a save took longer than the time that --signal leaves for it.
ended_by_slurm() {
  ended=yes interrupted=yes
  if [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" Reason=TimeLimit "* ]]; then
    requeue_unless stopped $((4 * max_restarts)) "time limit while saving"
  fi
}
trap ended_by_slurm TERM

run() {
  log "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST," \
    "code $(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)"
  log "olmo-sparsity ${*@Q}"
  environment
  rm -f "$OLMO_SPARSITY_SUSPECT"
  log_bytes=$(wc -c <"$log_file")
  # The tasks of a measurement do not need each other.
  local status=0 wait=$seconds_after_first_exit
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
    if requeue_unless dead "$max_restarts" "exit code $status"; then
      trap '' TERM # SLURM sends it to this shell and its commands, as the job is requeued
      [[ $status == 74 ]] && pause_for_disk
      exclude_failed_node
    fi
  fi
  return "$status"
}

# For the processes of the job.
environment() {
  export OLMO_SPARSITY_DEATHS="$PWD/slurm/logs/.deaths-$SLURM_JOB_ID"
  export OLMO_SPARSITY_SUSPECT="$PWD/slurm/logs/.suspect-$SLURM_JOB_ID"
  # This shell runs on the job's first node, and so does rank 0. The rest of what a process must know
  # (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) it takes from srun's variables: launch.py.
  # Another job on this node may have the port, so each start takes another one.
  export MASTER_ADDR MASTER_PORT=$((20000 + (SLURM_JOB_ID + 997 * ${SLURM_RESTART_COUNT:-0}) % 12000))
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

# requeue_unless HOW MOST REASON: requeue this job, unless it has ended so more than MOST times since
# its command last got on. Preemptions are not counted, so SLURM_RESTART_COUNT does not tell.
requeue_unless() {
  echo "$1" >>"$OLMO_SPARSITY_DEATHS"
  if (($(grep -c "^$1\$" "$OLMO_SPARSITY_DEATHS") <= $2)); then
    requeue "$3"
  else
    log "$3: not requeued after $2 restarts without getting on; find the cause above"
    return 1
  fi
}

requeue() {
  log "$1: requeued"
  scontrol requeue "$SLURM_JOB_ID" || log "… but not here: submit the same command again to go on"
}

# SLURM starts a requeued job again within minutes, so that all restarts would fail while a disk of
# the network is away. Five pauses are an hour, in which the job holds no nodes.
pause_for_disk() {
  scontrol update JobId="$SLURM_JOB_ID" StartTime=now+12minutes &&
    log "starts again in 12 minutes at the earliest: the disk may be back or have room then"
}

# --- nodes that failed ----------------------------------------------------------------------------

# What this shell and srun print to, if it is a file.
log_file=/proc/$$/fd/2
[[ -f $log_file ]] || log_file=/dev/null

# Lets the next starts of this job leave out the node at which it failed, if it is known. Called when
# the job is requeued, as SLURM does not change the nodes of a job that runs.
exclude_failed_node() {
  local node number job earlier='' excluded_file=slurm/logs/.excluded-$SLURM_JOB_ID
  node=$(failed_node)
  [[ -n $node ]] || return 0
  number=$(($(cat "$excluded_file" 2>/dev/null | wc -l) + 1))
  if ((number > max_excluded)); then
    log "$node failed, and is not excluded: at most $max_excluded nodes are (OLMO_SPARSITY_MAX_EXCLUDED)"
    return 0
  fi
  job=$(scontrol show job --oneliner "$SLURM_JOB_ID") || return 0
  [[ $job =~ \ ExcNodeList=([^ ]+) && ${BASH_REMATCH[1]} != "(null)" ]] && earlier=${BASH_REMATCH[1]}
  if ! has_spare_nodes "$node" "${earlier:+$earlier,}$node"; then
    log "$node failed, and is not excluded: the partition has too few other nodes of its kind"
  elif scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${earlier:+$earlier,}$node"; then
    echo "$node" >>"$excluded_file"
    log "$node failed: excluded from the next starts of this job ($number of at most $max_excluded nodes)"
  fi
}

# Prints the node that the processes of the last start have named, or the only one with tasks that
# crashed while others left because they lost a process.
failed_node() {
  if [[ -s $OLMO_SPARSITY_SUSPECT ]]; then
    head -n 1 "$OLMO_SPARSITY_SUSPECT"
    return
  fi
  # srun: error: n4: task 1: Killed
  # srun: error: n[3,5]: tasks 0,2-3: Exited with exit code 76
  # `Aborted` counts as 76: PyTorch aborts a process whose connection to another one breaks. 2 counts
  # as a crash: all processes of a run leave with it together, unless the GPU of one has no memory.
  local ends crashed
  ends=$(tail -c +$((log_bytes + 1)) "$log_file" | grep -E '^srun: error: \S+: tasks? [0-9,-]+: ')
  crashed=$(grep -vE '(Exited with exit code (74|75|76)|Aborted( \(core dumped\))?)$' <<<"$ends" |
    cut -d : -f 3 | sort -u)
  if [[ $ends == *@("exit code 76"|": Aborted")* && $crashed =~ ^\ [^[:space:],[]+$ ]]; then
    echo "${crashed# }"
  fi
}

# has_spare_nodes NODE EXCLUDED: whether nodes enough for this job are left without the excluded ones.
# Otherwise SLURM would hold it for ever (BadConstraints). Only nodes with the features, cores, memory
# and GPUs of NODE count, as the job may ask for these.
has_spare_nodes() {
  local nodes kind excluded
  excluded=$(scontrol show hostnames "$2") || return
  nodes=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --responding \
    --states=idle,alloc,mix,comp --format='%N %f %c %m %G') || return
  kind=$(grep -m 1 "^$1 " <<<"$nodes") || return
  nodes=$(grep -vE "^(${excluded//$'\n'/|}) " <<<"$nodes")
  (($(grep -cF " ${kind#* }" <<<"$nodes") >= SLURM_JOB_NUM_NODES))
}

log() {
  echo "[$(date --utc +%Y-%m-%dT%H:%M:%SZ)] $*"
}
