#!/usr/bin/env bash
# The first hour on a machine with GPUs and a network: real runs in order, stopping at the first failure.
#
# scripts/acceptance/gpu.sh              run everything that the machine's GPUs allow
# scripts/acceptance/gpu.sh --list       print each line: its name, what it decides, how many GPUs it needs
# scripts/acceptance/gpu.sh --dry-run    print the commands instead of running them
# scripts/acceptance/gpu.sh --from NAME  begin at a line, after a repair
#
# Writes gpu_acceptance/NAME.log for each line and gpu_acceptance/figures.md at the end. NUM_GPUS sets the number of GPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-gpu_acceptance}
LIMIT=${LIMIT:-1800} # seconds of one line
mode=run from=""
while (($#)); do
  case $1 in
    --list | --dry-run) mode=${1#--} ;;
    --from) from=${2:?--from needs the name of a line}; shift ;;
    *) echo "gpu.sh: unknown argument $1; allowed: --list, --dry-run, --from NAME" >&2; exit 2 ;;
  esac
  shift
done

count_gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c . || true; }
gpus=${NUM_GPUS:-$(count_gpus)}

cpu=(uv run)
cuda=(uv run --no-group cpu --group cuda)
grpo=("${cuda[@]}" examples/run_grpo.py)
math=("${grpo[@]}" --config grpo_math_1B.yaml)
short=(grpo.max_num_steps=3 grpo.num_prompts_per_step=8 policy.train_global_batch_size=128 checkpointing.enabled=false)
quick=(policy.device=cuda grpo.max_num_steps=5 checkpointing.enabled=false)
bf16=(policy.precision=bfloat16)
two=(cluster.gpus_per_node=2)
split=("${two[@]}" policy.generation.colocated.enabled=false policy.generation.colocated.resources.gpus_per_node=1)
half=(policy.model_name=Qwen/Qwen2.5-0.5B-Instruct)

begun=""
[[ -z $from ]] && begun=yes
known=""
done_lines=()

# line NAME GPUS DECIDES COMMAND...
line() {
  local name=$1 needed=$2 decides=$3 status=0 start
  shift 3
  known+=" $name"
  [[ $name == "$from" ]] && begun=yes
  [[ -n $begun ]] || return 0
  case $mode in
    list) printf '%-18s %s GPU  %s\n' "$name" "$needed" "$decides"; return ;;
    dry-run) printf '%s:' "$name"; printf ' %q' "$@"; printf '\n'; return ;;
  esac
  if ((gpus < needed)); then
    echo "SKIPPED $name: needs $needed GPUs, the machine has $gpus"
    done_lines+=("| $name | skipped: needs $needed GPUs | | |")
    return
  fi
  mkdir -p "$OUT"
  echo "RUNNING $name: $decides"
  start=$SECONDS
  echo "$needed" >"$OUT/$name.gpus"
  nvidia-smi --query-gpu=name --format=csv,noheader >"$OUT/gpu" 2>/dev/null || true
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop=1 >"$OUT/$name.memory" 2>/dev/null &
  local watcher=$!
  timeout "$LIMIT" "$@" >"$OUT/$name.log" 2>&1 || status=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  if ((status)); then
    echo "FAILED $name (exit code $status) after $((SECONDS - start)) s; it decides: $decides" >&2
    tail -n 30 "$OUT/$name.log" >&2
    done_lines+=("| $name | FAILED ($status) | $((SECONDS - start)) | $decides |")
    write_figures
    exit 1
  fi
  done_lines+=("| $name | passed | $((SECONDS - start)) | $decides |")
}

write_figures() {
  {
    echo "# Figures of $(date -u +%F)"
    echo
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || true
    printf '\n| line | outcome | seconds | decides |\n|---|---|---|---|\n'
    printf '%s\n' "${done_lines[@]}"
    echo
    "${PYTHON:-python3}" scripts/acceptance/gpu_figures.py "$OUT"
  } >"$OUT/figures.md"
  echo "figures: $OUT/figures.md"
}

run_dir() { printf 'logger.log_dir=%s/runs/%s' "$OUT" "$1"; }

line driver 1 "the driver is new enough for the wheels, and a GPU is visible" nvidia-smi
line cpu-group 1 "the CPU group beside a GPU trains on the CPU and says how to use the GPU" \
  "${cpu[@]}" examples/run_grpo.py grpo.max_num_steps=2 "$(run_dir cpu-group)"
line cuda-group 1 "the CUDA group installs, and torch sees the GPU" \
  "${cuda[@]}" python -c 'import torch, vllm; assert torch.cuda.is_available()'
line tests 1 "small models: colocated, asleep and awake, transports; on two GPUs ranks, split, tensor parallel" \
  "${cuda[@]}" pytest tests/functional/gpu -m gpu -x
line trainer 1 "the trainer alone: MFU, block sizes, peak memory against fake tensors, moves, IPC" \
  "${cuda[@]}" python scripts/acceptance/gpu_trainer.py --out "$OUT/gpu_trainer.json"
line quickstart 1 "the README's first command works on a GPU, in float32" "${grpo[@]}" "${quick[@]}" "$(run_dir quickstart)"
line quickstart-bf16 1 "bfloat16 passes the first refit" "${grpo[@]}" "${quick[@]}" "${bf16[@]}" "$(run_dir quickstart-bf16)"
line no-sleep 1 "an engine that keeps its memory" \
  "${grpo[@]}" "${quick[@]}" policy.generation.vllm_cfg.enable_sleep_mode=false \
  policy.generation.vllm_cfg.gpu_memory_utilization=0.3 "$(run_dir no-sleep)"
line dry-run-1.5b 1 "the plan of the 1.5B recipe fits this GPU" "${math[@]}" --dry-run
line real-0.5b 1 "a real bfloat16 model: first refit, three steps" "${math[@]}" "${short[@]}" "${half[@]}" "$(run_dir real-0.5b)"
line real-1.5b 1 "the 1.5B recipe fits, and what a step of it takes" \
  "${math[@]}" grpo.max_num_steps=5 checkpointing.enabled=false "$(run_dir real-1.5b)"
line padded 1 "the same without packing: what packing is worth" \
  "${math[@]}" "${short[@]}" policy.sequence_packing.enabled=false "$(run_dir padded)"
line lora 1 "adapters alone, merged for the engine" \
  "${math[@]}" "${short[@]}" "${half[@]}" ++policy.dtensor_cfg.lora_cfg.enabled=true "$(run_dir lora)"
line megatron 1 "Megatron-core on CUDA" \
  "${cuda[@]}" --extra megatron examples/run_grpo.py --config grpo_math_1B.yaml "${short[@]}" "${half[@]}" \
  ++policy.megatron_cfg.enabled=true policy.dtensor_cfg.enabled=false "$(run_dir megatron)"
line checkpoint 1 "a checkpoint is written" \
  "${grpo[@]}" policy.device=cuda grpo.max_num_steps=4 ++checkpointing.enabled=true ++checkpointing.save_period=2 \
  "++checkpointing.checkpoint_dir=$OUT/checkpoints" "$(run_dir checkpoint)"
line resume 1 "and the run resumes from it" \
  "${grpo[@]}" policy.device=cuda grpo.max_num_steps=6 ++checkpointing.enabled=true ++checkpointing.save_period=2 \
  "++checkpointing.checkpoint_dir=$OUT/checkpoints" "$(run_dir resume)"
line distillation 1 "teacher, policy and engine take turns on one GPU" \
  "${cuda[@]}" examples/run_distillation.py policy.device=cuda distillation.max_num_steps=3 "$(run_dir distillation)"
line ranks 2 "two ranks and two engines on their GPUs" \
  "${math[@]}" "${short[@]}" "${half[@]}" "${two[@]}" "$(run_dir ranks)"
line split 2 "policy and engine on GPUs of their own, weights over NCCL" \
  "${math[@]}" "${short[@]}" "${half[@]}" "${split[@]}" "$(run_dir split)"
line tensor-parallel 2 "tensor parallel policy and engine" \
  "${math[@]}" "${short[@]}" "${half[@]}" "${two[@]}" ++policy.dtensor_cfg.tensor_parallel_size=2 \
  policy.generation.vllm_cfg.tensor_parallel_size=2 "$(run_dir tensor-parallel)"
line megatron-ranks 2 "two tensor-parallel ranks of Megatron hand the weights to an engine over both GPUs" \
  "${cuda[@]}" --extra megatron examples/run_grpo.py --config grpo_math_1B.yaml "${short[@]}" "${half[@]}" "${two[@]}" \
  ++policy.megatron_cfg.enabled=true policy.dtensor_cfg.enabled=false ++policy.megatron_cfg.tensor_model_parallel_size=2 \
  policy.generation.vllm_cfg.tensor_parallel_size=2 "$(run_dir megatron-ranks)"
line learning 1 "reward rises over 60 steps" \
  "${grpo[@]}" policy.device=cuda grpo.max_num_steps=60 "${bf16[@]}" checkpointing.enabled=false "$(run_dir learning)"
line reward 1 "and by how much: the mean of the last ten steps is above that of the first ten" \
  "${PYTHON:-python3}" scripts/acceptance/gpu_figures.py "$OUT" --rising learning

if [[ -z $begun ]]; then
  echo "gpu.sh: --from $from: no such line; allowed:$known" >&2
  exit 2
fi
if [[ $mode == run ]]; then write_figures; fi
