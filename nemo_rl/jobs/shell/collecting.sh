# One array task: a chunk of one seed.

# collect: becomes `nemo-rl collect` in a task of the step; several tasks have chunks of their own.
collect() {
    set -euo pipefail
    local total=$((num_chunks * collection_tasks))
    share_gpus "$collection_tasks_per_node"
    collect_command+=("collect.seeds=$seed")
    if ((total > 1)); then
        collect_command+=("collect.chunk=$((chunk * collection_tasks + SLURM_PROCID))/$total")
    fi
    exec "${collect_command[@]}"
}

# requeue: of a task that comes to its time limit (--signal); Slurm ends it then, and starts it again.
requeue() {
    say "the time limit is near: this task is queued again"
    scontrol requeue "$SLURM_JOB_ID"
}

run_task() {
    local watched=()
    seed=${seeds[SLURM_ARRAY_TASK_ID / num_chunks]}
    chunk=$((SLURM_ARRAY_TASK_ID % num_chunks))
    run_dir="$job_dir/runs/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.${SLURM_RESTART_COUNT:-0}"
    mkdir -p "$run_dir"
    trap end_processes EXIT
    trap requeue USR1
    say "seed $seed, chunk $chunk of $num_chunks, on ${SLURM_JOB_NODELIST:-$(hostname)}"
    if ((has_servers)); then
        start_servers
    fi
    in_background - "$collection_environment" "${collection_step[@]}" bash -c "$(
        declare -p seed chunk num_chunks collection_tasks collection_tasks_per_node collect_command
        declare -f collect share_gpus
    ); collect"
    wait_beside "$started" "${watched[@]}"
    say "collected"
}
