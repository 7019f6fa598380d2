"""The scripts for GPU machines as far as a machine without one can run them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.layout import make_layout
from nemo_rl.config.loading import load_config, load_distillation_config
from nemo_rl.recipes import find_recipe
from tests.functional.gpu import test_run_grpo as gpu_tests

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts/acceptance/gpu.sh"


def run_gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run([GPU, *arguments], capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Stand-ins for uv, nvidia-smi: they succeed, but for the command that a file `fails` names."""
    for name in ("uv", "nvidia-smi"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n'
                          f'case "$*" in *"$(cat {tmp_path}/fails)"*) echo broken >&2; exit 3;; esac\n')  # fmt: skip
        script.chmod(0o755)
    (tmp_path / "fails").write_text("nothing fails")
    return tmp_path


def run_with(commands: Path, *arguments: str, gpus: str = "2") -> subprocess.CompletedProcess[str]:
    runs = commands / "out/runs/learning/exp_001"
    runs.mkdir(parents=True, exist_ok=True)
    steps = [
        {"train/loss": 0.1, "train/reward": 0.2 + 0.01 * n, "timing/train/total_step_time": 2.0} for n in range(60)
    ]
    (runs / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    path = f"{commands}/bin:{os.environ['PATH']}"
    return run_gpu(*arguments, PATH=path, OUT=str(commands / "out"), NUM_GPUS=gpus, PYTHON=sys.executable)


def test_the_list_says_what_each_line_decides() -> None:
    lines = run_gpu("--list").stdout.splitlines()
    assert lines[0].split()[0] == "driver"
    assert lines[-1].split()[0] == "reward"
    assert len(lines) >= 20
    assert all(" GPU  " in line for line in lines)


def test_a_dry_run_prints_commands_that_start_at_the_repository(tmp_path: Path) -> None:
    lines = run_gpu("--dry-run", OUT=str(tmp_path / "out")).stdout.splitlines()
    assert any(line.startswith("resume: uv run --no-group cpu --group cuda examples/run_grpo.py") for line in lines)
    assert not (tmp_path / "out").exists()


def test_every_run_is_one_that_two_gpus_allow() -> None:
    """A mistyped key, or a layout that is refused, would end the first hour."""
    names = []
    for text in run_gpu("--dry-run").stdout.splitlines():
        name, _, command = text.partition(": ")
        words = shlex.split(command)
        scripts = [word for word in words if word.startswith("examples/")]
        if not scripts:
            continue
        arguments = [word for word in words[words.index(scripts[0]) + 1 :] if word != "--dry-run"]
        is_distillation = scripts == ["examples/run_distillation.py"]
        recipe = "distillation" if is_distillation else "quickstart"
        if "--config" in arguments:
            at = arguments.index("--config")
            recipe, arguments = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
        load: Any = load_distillation_config if is_distillation else load_config
        config = load(find_recipe(recipe), [*arguments, "++cluster.gpu_memory_gb=80"])
        assert make_layout(config, "cuda").device == "cuda", name
        names.append(name)
    assert len(names) >= 15


@pytest.mark.parametrize(
    "options",
    [
        *gpu_tests.OPTIONS.values(),
        (gpu_tests.TWO_GPUS,),
        (gpu_tests.TWO_GPUS, *gpu_tests.TENSOR_PARALLEL),
        (gpu_tests.TWO_GPUS, *gpu_tests.SPLIT),
        (gpu_tests.TWO_GPUS, *gpu_tests.SPLIT, *gpu_tests.BACKGROUND),
    ],
)
def test_the_options_of_the_tests_on_gpus_are_allowed(options: tuple[str, ...]) -> None:
    overrides = [*gpu_tests.SMALL, *options]
    assert make_layout(load_config(find_recipe("quickstart"), overrides), "cuda").device == "cuda"


def test_every_line_runs_in_order_and_ends_in_a_page_of_figures(commands: Path) -> None:
    done = run_with(commands)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (commands / "out/figures.md").read_text()
    assert "| learning | passed |" in page
    assert "| learning | 2 |" in page  # seconds of a step


def test_the_first_failure_stops_it_and_says_what_it_decides(commands: Path) -> None:
    (commands / "fails").write_text("runs/no-sleep")
    done = run_with(commands)
    assert done.returncode == 1
    assert "FAILED no-sleep (exit code 3)" in done.stderr
    assert "an engine that keeps its memory" in done.stderr
    assert "broken" in done.stderr
    assert "real-0.5b" not in (commands / "calls").read_text()
    assert "| no-sleep | FAILED (3) |" in (commands / "out/figures.md").read_text()


def test_lines_for_more_gpus_than_there_are_are_reported_as_skipped(commands: Path) -> None:
    done = run_with(commands, "--from", "ranks", gpus="1")
    assert done.returncode == 0, done.stderr
    assert "SKIPPED split: needs 2 GPUs, the machine has 1" in done.stdout
    assert "quickstart" not in (commands / "calls").read_text()


def test_a_name_that_is_no_line_is_an_error() -> None:
    done = run_gpu("--dry-run", "--from", "nothing")
    assert done.returncode == 2
    assert "no such line; allowed: driver cpu-group" in done.stderr


def test_the_trainer_script_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, ROOT / "scripts/acceptance/gpu_trainer.py", "--device", "cpu", "--out", out]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["train_packed"]["tokens_per_s"] > 0
    assert figures["sft"]["last_loss"] < 0.5 * figures["sft"]["first_loss"]
    assert figures["logits"]["float32_error"] < figures["logits"]["bfloat16_error"]
    assert figures["buckets"]["gb_per_s"] > 0
    assert figures["ipc"]["gb"] == pytest.approx(2**20 / 1e9)
