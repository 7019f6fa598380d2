# The job: steps of Slurm with an environment of their own; where one fails, the job ends.

processes=() # those to be ended with the job

end_processes() {
    if ((${#processes[@]})); then
        kill "${processes[@]}" 2>/dev/null || true
    fi
}

# in_environment FILE COMMAND...: becomes the command, with the variables that FILE sets ("": none).
in_environment() {
    if [[ -n "$1" ]]; then
        set -a
        # shellcheck disable=SC1090  # written by nemo-rl submit
        . "$1"
        set +a
    fi
    exec "${@:2}"
}

# in_background LOG FILE COMMAND...: starts a step, LOG "-" being the job's; `started` is its process.
in_background() {
    local log=$1
    if [[ "$log" == - ]]; then
        in_environment "${@:2}" </dev/null &
    else
        in_environment "${@:2}" </dev/null >>"$log" 2>&1 &
    fi
    started=$!
    processes+=("$started")
}
