# Tasks of a step that share a node.

# share_gpus NUM_TASKS: keeps this task's share of the visible GPUs if several tasks run on a node.
share_gpus() {
    local gpus share
    if (($1 == 1)) || [[ -z "${CUDA_VISIBLE_DEVICES:-}" ]]; then
        return 0
    fi
    IFS=, read -r -a gpus <<<"$CUDA_VISIBLE_DEVICES"
    share=$((${#gpus[@]} / $1))
    if ((share == 0)); then
        echo "$1 tasks on a node that has ${#gpus[@]} GPUs" >&2
        return 1
    fi
    gpus=("${gpus[@]:SLURM_LOCALID * share:share}")
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]}")
    export CUDA_VISIBLE_DEVICES
}
