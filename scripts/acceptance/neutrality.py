"""Does a change that claims to change nothing change nothing? Two steps of every recipe that runs on a CPU.

python scripts/acceptance/neutrality.py record DIR [NAME...]    run the recipes (or those named), store metrics in DIR
python scripts/acceptance/neutrality.py compare BEFORE AFTER    print every metric that differs; exit 1 if any does

Recipes sample with the `hf` engine, whose results repeat to the last bit; the quickstart also runs with vLLM. Recipes
for larger models keep their loss and advantages but use the quickstart's model, data and lengths. `record` runs the
checkout in which it is called; record the version before from a clone of it.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

HF = ("policy.generation.backend=hf",)
GRPO = ("grpo.max_num_steps=2", "grpo.val_period=0", "grpo.val_at_end=true", "grpo.val_at_start=false")
AGE_ZERO = "grpo.async_grpo.max_trajectory_age_steps=0"
DISTILLATION = tuple(override.replace("grpo.", "distillation.") for override in GRPO)

SMALL_MODEL = """
defaults: {recipe}
grpo: {{num_prompts_per_step: 16, num_generations_per_prompt: 8, max_num_steps: 2,
  max_num_epochs: 100, batch_multiplier: 1, val_period: 0, val_at_end: true, max_val_samples: 100,
  reward_shaping: {{overlong_buffer_length: 4}}}}
policy:
  model_name: nemo_rl/quickstart
  tokenizer: {{name: null}}
  precision: float32
  train_global_batch_size: 64
  train_micro_batch_size: 64
  max_total_sequence_length: 64
  generation: {{max_new_tokens: 8, backend: hf, vllm_cfg: {{precision: float32, max_model_len: 64}}}}
data:
  train: {{dataset_name: reasoning_gym, task: spell_backward, task_kwargs: {{min_word_len: 3, max_word_len: 5}},
    size: 12000, split: null}}
  validation: {{dataset_name: reasoning_gym, task: spell_backward, task_kwargs: {{min_word_len: 3, max_word_len: 5}},
    size: 220, seed: 1234, split: null}}
  default: {{env_name: reasoning_gym, prompt_file: null}}
env: {{reasoning_gym: {{require_stop: true}}}}
checkpointing: {{enabled: false}}
"""
SMALL_RECIPES = ("grpo_math_1B", "cispo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "rloo")

RUNS = {
    "quickstart": ("run_grpo.py", (*GRPO, *HF)),
    "quickstart_vllm": ("run_grpo.py", GRPO),
    "lora": ("run_grpo.py", ("--config", "lora.yaml", *GRPO, *HF)),
    "async": ("run_grpo.py", ("--config", "async.yaml", *GRPO, AGE_ZERO)),
    "sft": ("run_sft.py", ("sft.max_num_steps=2",)),
    "reward_model": ("run_rm.py", ("rm.max_num_steps=2", "rm.val_period=1")),
    "distillation": ("run_distillation.py", (*DISTILLATION, *HF)),
    "cross_tokenizer": (
        "run_distillation.py",
        ("--config", "distillation_cross_tokenizer.yaml", *DISTILLATION, *HF),
    ),
}  # fmt: skip

TIMED = ("timing/", "performance/", "efficiency/", "memory/", "system/")
DEADLINE_S = 1800  # of one run; the cross-tokenizer teacher is trained on first use
IN_FLOAT = 1e-5  # vLLM's batches differ with the schedule, so its log-probs differ in the last bits


def record(directory: Path, names: list[str]) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = dict(RUNS)
        for recipe in SMALL_RECIPES:
            path = Path(scratch) / f"{recipe}.yaml"
            path.write_text(SMALL_MODEL.format(recipe=recipe))
            runs[recipe] = ("run_grpo.py", ("--config", str(path)))
        runs = {name: run for name, run in runs.items() if not names or name in names}
        for name, (script, arguments) in runs.items():
            logs = Path(scratch) / name
            command = [sys.executable, f"examples/{script}", *arguments, f"logger.log_dir={logs}"]
            if script == "run_rm.py":
                command.append(f"checkpointing.checkpoint_dir={logs}/model")
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            found = sorted(logs.glob("exp_*/metrics.jsonl"))
            if done.returncode or not found:
                failed += 1
                (directory / f"{name}.stderr").write_text(done.stderr)
                print(f"{name}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            (directory / f"{name}.jsonl").write_text(found[-1].read_text())
            print(f"{name}: {len(found[-1].read_text().splitlines())} lines", flush=True)
    return 1 if failed else 0


def compare(before: Path, after: Path) -> int:
    differing = 0
    for file in sorted(before.glob("*.jsonl")):
        if not (after / file.name).is_file():
            print(f"{file.stem}: missing in {after}")
            differing += 1
            continue
        tolerance = IN_FLOAT if "vllm" in file.stem or file.stem == "async" else 0.0
        old, new = _metrics(file), _metrics(after / file.name)
        problems = [
            f"  {name}: {old.get(name)} -> {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if not _equal(old.get(name), new.get(name), tolerance)
        ]
        differing += bool(problems)
        print(f"{file.stem}: {len(old)} metrics, {len(problems)} differ", *problems, sep="\n")
    return 1 if differing else 0


def _equal(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(1.0, abs(a))


def _metrics(file: Path) -> dict[str, float]:
    """Every number by "step name", timings left out."""
    found = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith(TIMED):
                found[f"{step} {name}"] = value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("directory", type=Path)
    recording.add_argument("names", nargs="*", help="of the recipes; all without it")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        return record(arguments.directory, arguments.names)
    return compare(arguments.before, arguments.after)


if __name__ == "__main__":
    sys.exit(main())
