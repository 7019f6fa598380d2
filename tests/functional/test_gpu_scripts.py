"""The scripts for GPU machines as far as a machine without one can run them."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config, load_distillation_config
from nemo_rl.recipes import find_recipe
from tests.functional.gpu import test_run_grpo as gpu_tests

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts/acceptance/gpu.py"
LISTS = ("one", "more", "eight", "offline")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its directory is on the path when it runs."""
    monkeypatch.syspath_prepend(str(GPU.parent))
    return importlib.import_module("gpu")


def run_gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    command = [sys.executable, GPU, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Stand-ins for uv and nvidia-smi: they succeed, but for the commands that the files `fails`, `hangs` name."""
    for name in ("uv", "nvidia-smi"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'''#!/bin/sh
echo "{name} $*" >> {tmp_path}/calls
case "$*" in
  *query-gpu=memory*) echo 2000; exit;;
  *query-gpu=*) echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"; exit;;
  *"$(cat {tmp_path}/hangs)"*) sh -c 'echo $$ > {tmp_path}/child; exec sleep 600'; exit;;
  *"$(cat {tmp_path}/fails)"*) echo broken >&2; exit 3;;
esac
''')
        script.chmod(0o755)
    (tmp_path / "fails").write_text("nothing fails")
    (tmp_path / "hangs").write_text("nothing hangs")
    runs = tmp_path / "out/runs/quickstart/exp_001"
    runs.mkdir(parents=True)
    steps = [{"train/loss": 0.1, "performance/train_flops": 9.89e13, "timing/train/total_step_time": 2.0 + (n == 0)}
             for n in range(3)]  # fmt: skip
    (runs / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return tmp_path


def run_with(commands: Path, *arguments: str, gpus: str = "1") -> subprocess.CompletedProcess[str]:
    path = f"{commands}/bin:{os.environ['PATH']}"
    return run_gpu(*arguments, "--out", str(commands / "out"), "--gpus", gpus, PATH=path)


@pytest.mark.parametrize("name", LISTS)
def test_limits_of_a_list_sum_within_its_minutes(gpu: Any, name: str) -> None:
    chosen = gpu.named_lists("python", engine="hf")[name]
    assert sum(line.limit_s for line in chosen.lines) <= 60 * chosen.minutes


@pytest.mark.parametrize("name", LISTS)
def test_lines_need_lines_before_them(gpu: Any, name: str) -> None:
    seen = {""}
    for line in gpu.named_lists("python", engine="hf")[name].lines:
        assert line.needs in seen, line.name
        assert line.name not in seen
        seen.add(line.name)


def test_one_gpu_takes_at_most_25_minutes_and_a_lent_machine_ten(gpu: Any) -> None:
    lists = gpu.named_lists("python", engine="hf")
    assert lists["one"].minutes <= 25
    assert lists["offline"].minutes < 10


def test_the_list_says_what_each_line_decides() -> None:
    lines = run_gpu("--list").stdout.splitlines()
    assert lines[0].split()[0] == "driver"
    assert len(lines) >= 10
    assert all(" s  " in line for line in lines)


def test_a_dry_run_prints_commands_and_writes_nothing(tmp_path: Path) -> None:
    lines = run_gpu("more", "--dry-run", "--out", str(tmp_path / "out")).stdout.splitlines()
    assert any(line.startswith("resume: uv run --no-group cpu --group cuda examples/run_grpo.py") for line in lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", LISTS)
def test_every_run_is_one_that_its_gpus_allow(gpu: Any, tmp_path: Path, name: str) -> None:
    """A mistyped key, or a layout that is refused, would cost a line of the day."""
    checked = 0
    for line in gpu.named_lists("python", engine="hf")[name].lines:
        words = gpu.command_of(line, tmp_path)
        scripts = [word for word in words if word.startswith("examples/")]
        if not scripts:
            continue
        arguments = words[words.index(scripts[0]) + 1 :]
        is_distillation = scripts == ["examples/run_distillation.py"]
        recipe = "distillation" if is_distillation else "quickstart"
        if "--config" in arguments:
            at = arguments.index("--config")
            recipe, arguments = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
        load: Any = load_distillation_config if is_distillation else load_config
        config = load(find_recipe(recipe), [*arguments, "++cluster.gpu_memory_gb=80"])
        on_cpu = line.name in ("cpu", "cpu-group")
        assert make_layout(config, "cpu" if on_cpu else "cuda").device == ("cpu" if on_cpu else "cuda"), line.name
        checked += 1
    assert checked >= 5


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
    assert "- 1 x NVIDIA H100 80GB HBM3, 81559 MiB, 580.1" in page
    assert "| uncompiled | passed |" in page
    # step 2 s, 9.89e13 of 9.89e14 FLOP/s, 2,000 MiB
    assert "| quickstart | 2 | - | - | - | - | 9.89e+13 | - | 0.100 | 2.1 |" in page
    assert "lines passed" in done.stdout
    calls = (commands / "calls").read_text()
    assert calls.index("runs/quickstart") < calls.index("runs/math-in-turns") < calls.index("runs/cpu-group")


def test_what_is_to_be_sent_is_one_archive(commands: Path) -> None:
    assert run_with(commands).returncode == 0
    with tarfile.open(commands / "out/to_send.tar.gz") as archive:
        names = archive.getnames()
    assert {"out/figures.md", "out/outcomes.json", "out/logs/quickstart.log"} < set(names)
    assert "out/runs/quickstart/exp_001/metrics.jsonl" in names


def test_a_failed_line_does_not_stop_the_others(commands: Path) -> None:
    (commands / "fails").write_text("runs/math-in-turns")
    done = run_with(commands)
    assert done.returncode == 1
    assert "FAILED math-in-turns (exit code 3): the 1.5B recipe fits" in done.stdout
    page = (commands / "out/figures.md").read_text()
    assert "| math-in-turns | FAILED (exit code 3) |" in page
    assert "\nbroken\n```" in page
    assert "| megatron | passed |" in page


def test_lines_that_need_a_failed_one_are_not_run(commands: Path) -> None:
    (commands / "fails").write_text("import vllm")
    done = run_with(commands)
    assert done.returncode == 1
    assert "NOT RUN megatron (needs install: FAILED)" in done.stdout
    assert "passed cpu-group" in done.stdout
    assert "runs/megatron" not in (commands / "calls").read_text()


def test_a_line_past_its_limit_is_ended_with_what_it_started(gpu: Any, commands: Path) -> None:
    started, path = commands / "child", commands / "bin/uv"
    (commands / "hangs").write_text("hanging")
    line = gpu.Line("hanging", 1, "nothing", (str(path), "hanging"))
    (commands / "out/logs").mkdir()
    assert gpu.run_command(line, commands / "out", 1.0) is None
    child = Path(f"/proc/{int(started.read_text())}/stat")
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_no_line_begins_after_the_budget(commands: Path) -> None:
    (commands / "hangs").write_text("runs/quickstart")
    done = run_with(commands, "--minutes", "0.12")
    assert done.returncode == 1
    assert "TIMED OUT quickstart" in done.stdout
    assert "NOT RUN math-in-turns (no time left)" in done.stdout
    assert "runs/math-in-turns" not in (commands / "calls").read_text()


def test_a_list_for_more_gpus_is_refused(commands: Path) -> None:
    done = run_with(commands, "eight", gpus="2")
    assert done.returncode == 2
    assert "the list eight needs 8 GPUs; this machine has 2" in done.stdout + done.stderr


def test_a_name_that_is_no_line_is_an_error() -> None:
    done = run_gpu("--dry-run", "--from", "nothing")
    assert done.returncode == 2
    assert "no such line; allowed: driver install" in done.stderr


def test_the_offline_list_imports_modules_that_there_are(gpu: Any) -> None:
    (line,) = (n for n in gpu.named_lists("python", engine="hf")["offline"].lines if n.name == "imports")
    modules = line.command[2].partition(";")[0].removeprefix("import ").split(", ")
    for name in modules:
        assert importlib.util.find_spec(name) is not None, name


@pytest.mark.slow  # trains each of the models
def test_models_for_machines_without_a_network_train(tmp_path: Path, gpu: Any) -> None:
    """The offline list's own commands, but for the device and the size of the model."""
    from tests.functional.cli import run_grpo

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(GPU.parent / "gpu_models.py"), str(tmp_path / "models"), "--tiny"]
    assert subprocess.run(command, env=env, timeout=300, check=False).returncode == 0
    (line,) = (n for n in gpu.named_lists("python", engine="hf")["offline"].lines if n.name == "1.5b-in-turns")
    words = [word for word in gpu.command_of(line, tmp_path)[2:] if "policy.device" not in word]
    run = run_grpo(tmp_path / "runs", *words, "policy.device=cpu", "grpo.max_num_steps=1")
    assert run.returncode == 0, run.stderr
    assert run.metrics()[1]["train/loss"] == pytest.approx(0, abs=1)


@pytest.mark.slow  # trains each of its models
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
    assert "megatron" not in figures
    assert figures["ipc"]["gb"] == pytest.approx(2**20 / 1e9)


@pytest.mark.slow  # as above
def test_the_trainer_script_trains_on_megatron_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, GPU.parent / "gpu_trainer.py", "--device", "cpu", "--parts", "megatron", "--out", out]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())["megatron"]
    assert figures["last_loss"] < 0.5 * figures["first_loss"]
