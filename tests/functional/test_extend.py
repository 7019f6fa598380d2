"""docs/extend.md does what it says: its modules lie outside of the repository, and its commands train two steps."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.engines import save_tiny_model
from tests.functional.cli import DEADLINE_S, ROOT, Run, environment, run_directory
from tests.support.quick import quick
from tests.unit.docs.pages import commands, fenced_blocks, text_of

PAGE = text_of("extend.md")
COMMANDS = list(commands(PAGE))
TWO_STEPS = ["grpo.max_num_steps=2", "grpo.val_at_start=false", "checkpointing.enabled=false"]
SMALL = ["grpo.num_prompts_per_step=4", "grpo.max_val_samples=8"]
# Metrics that a part's own code has logged.
LOGGED = {
    "my_lab.losses:Reinforce": "train/entropy",
    "my_lab.entries:REINFORCE": "train/entropy",
    "my_lab.metrics:MeasuredReinforce": "train/min_logprob",
    "my_lab.environments:SecondTry": "train/total_turns",
    "my_lab.scorers:Brevity": "train/reward/brevity",
}


QUICK = [each for each in COMMANDS if any(part in each for part in ("engines", "losses"))]


def name_of(command: str) -> str:
    """Return the part of the page that the command names."""
    return command.partition("my_lab.")[2].split()[0]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the modules of the page; return the directory in which runs start."""
    directory = tmp_path_factory.mktemp("elsewhere")
    for language, content in fenced_blocks(PAGE):
        if language == "python":
            match = re.match(r"# (my_lab/\w+\.py)\n", content)
            assert match is not None, content.partition("\n")[0]
            path = directory / match[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return directory


def run(package: Path, command: str) -> Run:
    """Run a command of the page for two steps, with the engine that needs no process where it names none."""
    words = shlex.split(command.replace("$NEMO_RL", str(ROOT)))
    assert words[:3] == ["uv", "run", "--project"]
    script, *overrides = words[4:]
    if "policy.generation.backend" not in command:
        overrides.append("policy.generation.backend=hf")
    logs = package / "runs" / str(COMMANDS.index(command))
    done = subprocess.run(
        [sys.executable, script, *overrides, *SMALL, *TWO_STEPS, f"logger.log_dir={logs}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        cwd=package,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, run_directory(logs))


@pytest.mark.parametrize("command", quick(COMMANDS, QUICK), ids=name_of)
def test_a_part_from_outside_the_repository_trains(package: Path, command: str) -> None:
    done = run(package, command)
    assert done.returncode == 0, done.stderr
    metrics = done.metrics()
    assert metrics[2]["train/num_optimizer_steps"] >= 1
    for part, name in LOGGED.items():
        if part in command:
            assert name in metrics[2]


def test_its_tests_pass_and_its_check_refuses(package: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=True)
    code = f"""
from my_lab.entries import REINFORCE, ReinforceConfig
from my_lab.test_parts import check_my_engine, test_environments, test_estimator, test_loss
from nemo_rl.errors import ConfigError
test_loss(), test_estimator(), test_environments(), check_my_engine({str(tmp_path)!r})
try:
    REINFORCE.check("loss_fn", ReinforceConfig(type="x", entropy_weight=-1.0), None)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        cwd=package,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss_fn.entropy_weight = -1.0: must be at least 0\n"


def test_every_module_of_the_page_is_used_by_a_command() -> None:
    modules = set(re.findall(r"^# my_lab/(\w+)\.py$", PAGE, re.MULTILINE)) - {"test_parts"}
    assert [name for name in modules if not any(f"my_lab.{name}:" in command for command in COMMANDS)] == []


@pytest.fixture(autouse=True)
def _repository_is_unchanged() -> None:
    assert not (ROOT / "my_lab").exists()
