"""What goes wrong: doctor before the start, a run that ends by an error, one that is killed, one that is stopped."""

import json
import os
import shutil
import signal
import subprocess
import time

from journey import SHORT, Journey, main

REWARDS = """
calls = 0


def broken(messages, metadata):
    raise RuntimeError("the table has no such column")


def late(messages, metadata):
    global calls
    calls += 1
    if calls > 35:  # in the third step of 16
        raise RuntimeError("the quota is spent")
    return float(calls % 2)
"""
RECIPE = """
defaults: quickstart
data:
  _override_: true
  train: {dataset_name: reasoning_gym, task: spell_backward, size: 200, env_name: own}
env: {_override_: true, own: {type: "rewards:late", retries: {max_retries: 0}}}
"""


def travel(journey: Journey) -> None:
    """Meet the faults one after the other."""
    journey.write("rewards.py", REWARDS)
    journey.write("grpo.yaml", RECIPE)
    journey.write("taken", "")
    has_slurm = shutil.which("sbatch") is not None  # jobs may have the GPUs that this machine lacks
    for override, cause in (
        ("env.own.type=rewards:broken", "RuntimeError: the table has no such column"),
        ("logger.log_dir=taken/runs", "logger.log_dir = 'taken/runs'"),
        ("policy.model_name=org/absent", "org/absent is not in"),
        ("policy.generation.max_new_tokens=100", "policy.generation.max_new_tokens = 100"),
        *([] if has_slurm else [("policy.device=cuda", "policy.device = cuda, and this machine has no NVIDIA driver")]),
    ):
        journey.says(journey.nemo_rl("doctor", "--config", "grpo.yaml", override, code=1), "FAULT: ", cause)
    journey.says(journey.nemo_rl("train", code=2), "no such command: 'train'; did you mean grpo?")

    output = journey.nemo_rl("grpo", *SHORT, code=1)
    journey.says(output, "RolloutError", "the quota is spent")
    checked = journey.nemo_rl("check", "runs/exp_001", code=1)
    journey.says(checked, "alarm    run_failed: the run ended after step 2: RolloutError")

    for number, (sign, name) in enumerate(((signal.SIGKILL, "run_died"), (signal.SIGINT, None)), start=2):
        kill(journey, number, sign)
        checked = journey.nemo_rl("check", f"runs/exp_{number:03d}", "--json", code=int(name is not None))
        found = [finding["name"] for finding in json.loads(checked) if finding["name"].startswith("run_")]
        journey.claim(f"after {sign.name} check finds {name}", found == ([name] if name else []), checked)


def kill(journey: Journey, number: int, sign: signal.Signals) -> None:
    """Start a long run and end it by a signal in its first steps."""
    words = (*journey.program, "grpo", "--config", "quickstart", *SHORT, "grpo.max_num_steps=10000")
    process = subprocess.Popen(
        words, cwd=journey.directory, env=journey.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics, deadline = journey.directory / f"runs/exp_{number:03d}/metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and "train/loss" in metrics.read_text():
            break
        time.sleep(0.2)
    os.kill(process.pid, sign)
    journey.claim(f"the run ends by {sign.name}", process.wait(timeout=120) in (-sign, 130))


if __name__ == "__main__":
    main(travel)
