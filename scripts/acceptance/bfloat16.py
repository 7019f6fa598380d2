#!/usr/bin/env python3
"""Hold vLLM and the trainer together in bfloat16: the refits, and 20 steps of GRPO, of SmolLM2-135M on a CPU.

scripts/acceptance/bfloat16.py refits [--in-process]             ten seeds: right weights pass, a wrong matrix fails
scripts/acceptance/bfloat16.py train [--in-process] [--steps N]  every refit is verified, the mismatch is bounded
    --bfloat16-logits  engine and trainer round logits to bfloat16
    --seed S         of the run of `train`
    --directory D    keeps the model, the results and the checkpoints: the same command continues what was stopped
    --minutes M      stops after that time

Needs the development dependencies. Exit status 0: done and passed; 1: failed; 3: stopped by --minutes.
Bars: every refit of the right weights passes and every one with a wrong matrix fails; `train/token_mult_prob_error`
stays below 1.05 in every step.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.generation.vllm.engine import VllmGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
BAR = 1.05
METRIC = "train/token_mult_prob_error"
NUM_SEEDS = 10
STOPPED = 3
REWARD = """
def vowels(messages, metadata):
    text = messages[-1]["content"]
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("refits", "train"))
    parser.add_argument("--in-process", action="store_true", help="vLLM on a thread of the trainer's process")
    parser.add_argument("--bfloat16-logits", action="store_true", help="on both sides")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--minutes", type=float, default=600)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).absolute()
        model = make_model(directory)
        place = "in_process" if options.in_process else "own_process"
        directory /= f"{place}{'_bfloat16' * options.bfloat16_logits}_seed{options.seed}"
        directory.mkdir(exist_ok=True)
        case = Case(model, directory, options.in_process, options.bfloat16_logits, options.seed)
        return (
            check_refits(case, deadline) if options.part == "refits" else check_training(case, deadline, options.steps)
        )


@dataclass(frozen=True)
class Case:
    """Where vLLM runs, and how logits are computed."""

    model: Path
    directory: Path
    in_process: bool
    bfloat16_logits: bool
    seed: int

    @property
    def vllm_kwargs(self) -> dict[str, Any]:
        return {"hf_overrides": {"head_dtype": "model"}} if self.bfloat16_logits else {}


def make_model(directory: Path) -> Path:
    from tests.contracts.smollm2 import save_smollm2  # loads torch

    if (directory / "model" / "config.json").exists():
        return directory / "model"
    return save_smollm2(directory / "model")


def check_refits(case: Case, deadline: float) -> int:
    """Refit with right and with wrong weights for each seed, and print what the verification measured."""
    file = case.directory / "refits.jsonl"
    known = read_jsonl(file)
    done = {(record["seed"], record["right"]) for record in known}
    wanted = [(seed, right) for seed in range(NUM_SEEDS) for right in (True, False) if (seed, right) not in done]
    with file.open("a", encoding="utf-8") as output:
        for record in measure_refits(case, wanted) if wanted else ():
            known.append(record)
            print(json.dumps(record), file=output, flush=True)
            if time.monotonic() > deadline:
                break
    for right in (True, False):
        records = [record for record in known if record["right"] is right]
        for key in ("mean", "largest"):
            values = sorted(record[key] for record in records)
            print(f"{'right weights' if right else 'one wrong matrix'}, {key} difference of log-probs over "
                  f"{len(values)} seeds: {values[0]:.3f} to {values[-1]:.3f}")  # fmt: skip
    wrong = [record for record in known if record["passed"] is not record["right"]]
    print(f"{len(known)} refits, {len(wrong)} judged wrongly: {wrong}")
    return 1 if wrong else 0 if len(known) == 2 * NUM_SEEDS else STOPPED


def measure_refits(case: Case, wanted: list[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """Yield the verdict of a refit for each seed and whether its weights are right."""
    from nemo_rl.config.shared_sections import WeightSyncConfig
    from nemo_rl.errors import WeightSyncError
    from nemo_rl.policy import logprobs
    from nemo_rl.weight_sync.refit import TransportWeightSync
    from tests.contracts.smollm2 import Misplaced, RecordedScores, make_policy, probes

    if case.bfloat16_logits:
        logprobs.KEEPS_FLOAT32_LOGITS = False
    policy = make_policy(case.model)
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(case))
        try:
            for seed, right in wanted:
                recorded = RecordedScores(policy if right else Misplaced(policy, seed))
                sync = TransportWeightSync(probes(case.model, seed), WeightSyncConfig(), "bfloat16")
                passed = True
                try:
                    runner.run(sync.publish(recorded, engine, weight_version=seed))  # type: ignore[arg-type]
                except WeightSyncError:
                    passed = False
                finally:
                    sync.close()
                yield {"seed": seed, "right": right, "passed": passed, **recorded.differences()}
        finally:
            runner.run(engine.close())
            runner.run(policy.close())


async def start_engine(case: Case) -> "VllmGeneration":
    from nemo_rl.generation.engines import EngineModel
    from nemo_rl.generation.vllm.engine import VllmGeneration
    from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
    from tests.contracts.smollm2 import MAX_LENGTH

    cfg = VllmConfig(kv_cache_memory_bytes=2**26, max_num_seqs=8, in_process=case.in_process)
    section = VllmGenerationConfig(vllm_cfg=cfg, vllm_kwargs=case.vllm_kwargs)
    return await VllmGeneration.create(section, EngineModel(str(case.model), "bfloat16", MAX_LENGTH, "cpu"))


def check_training(case: Case, deadline: float, steps: int) -> int:
    """Train, continuing what an earlier call has stopped, and print the mismatch of every step."""
    own = case.directory
    process = subprocess.Popen(command(case, steps), cwd=own)
    try:
        status = process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        process.terminate()  # it saves a checkpoint
        process.wait()
        status = STOPPED
    by_step = {
        r["step"]: r for path in sorted(own.glob("runs/*/metrics.jsonl")) for r in read_jsonl(path) if METRIC in r
    }
    for step, record in sorted(by_step.items()):
        print(f"step {step:2d}: {METRIC} {record[METRIC]:.4f}, reward {record['train/reward']:.4f}")
    errors = [record[METRIC] for record in by_step.values()]
    print(f"{METRIC} over {len(errors)} of {steps} steps: at most {max(errors, default=0):.4f} [{BAR}]")
    if status not in (0, STOPPED) or max(errors, default=0) >= BAR:
        return 1
    return 0 if len(errors) == steps else STOPPED


def command(case: Case, steps: int) -> list[str]:
    """Return the run: 4 prompts x 4 responses of at most 32 tokens a step, rewarded for vowels; all refits verified."""
    (case.directory / "acceptance_reward.py").write_text(REWARD)
    overrides = {
        "policy.model_name": case.model,
        "policy.precision": "bfloat16",
        "policy.device": "cpu",
        "policy.max_total_sequence_length": 128,
        "policy.train_micro_batch_size": 8,
        "policy.generation.max_new_tokens": 32,
        "policy.generation.vllm_cfg.in_process": str(case.in_process).lower(),
        "policy.optimizer.kwargs.lr": "1e-5",
        "grpo.seed": case.seed,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": steps,
        "grpo.val_period": 0,
        "grpo.val_at_end": "false",
        "grpo.val_at_start": "false",
        "weight_sync.verify": "true",
        "env.vowels.type": "acceptance_reward:vowels",
        "data.default.env_name": "vowels",
        "checkpointing.metric_name": "null",
        "checkpointing.save_period": 1000,
        "checkpointing.keep_top_k": 1,
        "checkpointing.checkpoint_dir": case.directory / "checkpoints",
        "logger.log_dir": case.directory / "runs",
    }
    if case.bfloat16_logits:
        overrides["policy.generation.vllm_kwargs"] = "{hf_overrides: {head_dtype: model}}"
    change = "logprobs.KEEPS_FLOAT32_LOGITS = False" if case.bfloat16_logits else "None"
    script = str(ROOT / "examples" / "run_grpo.py")
    start = (
        f"import runpy; from nemo_rl.policy import logprobs; {change}; runpy.run_path({script!r}, run_name='__main__')"
    )
    return [sys.executable, "-c", start, *(f"++{key}={value}" for key, value in overrides.items())]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
