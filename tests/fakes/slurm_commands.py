"""Slurm's commands without Slurm: a step's tasks are processes of this machine."""

from pathlib import Path

SRUN = """#!/usr/bin/env bash
# Runs a step's tasks at once; with --kill-on-bad-exit the first that fails ends the others.
nodes=1 per_node=1 tasks=()
echo "srun $*" >>"${SRUN_LOG:-/dev/null}"
while [[ "$1" == -* ]]; do
    case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks-per-node=*) per_node=${1#*=} ;;
    --chdir=*) cd "${1#*=}" || exit 1 ;;
    esac
    shift
done
trap 'kill "${tasks[@]}" 2>/dev/null' EXIT
trap 'exit 143' TERM
for ((task = 0; task < nodes * per_node; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$((task / per_node)) "$@" &
    tasks+=($!)
done
for _ in "${tasks[@]}"; do
    wait -n || exit
done
"""

SBATCH = """#!/usr/bin/env bash
# Numbers jobs from 100 on, and writes down what it was called with; refuses what stands in SBATCH_REFUSES.
if [[ -n "${SBATCH_REFUSES:-}" && "$*" == *"$SBATCH_REFUSES"* ]]; then
    echo "sbatch: error: Invalid partition" >&2
    exit 1
fi
echo "$*" >>"$SBATCH_LOG"
echo "$((99 + $(wc -l <"$SBATCH_LOG")))"
"""


def write_srun(directory: Path) -> Path:
    """Make a directory for PATH that holds the fake commands."""
    return _write(directory, "srun", SRUN)


def write_sbatch(directory: Path) -> Path:
    """Make the same; calls are lines of the file that SBATCH_LOG names."""
    return _write(directory, "sbatch", SBATCH)


def _write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)
    return directory
