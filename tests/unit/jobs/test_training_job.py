"""The Slurm job of a training command: its script, its configuration, what is refused."""

import subprocess
from pathlib import Path

import pytest

from nemo_rl.cli import run
from nemo_rl.config.loading import load_config
from nemo_rl.jobs import sbatch


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["submit", *words]) == 0
    return capsys.readouterr().out


def test_the_script_runs_the_supervised_command_and_asks_for_a_signal_before_the_end(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("slurm.time=04:00:00", "slurm.save_s_before_end=90", "slurm.restarts=3", "slurm.program=[nemo-rl]")
    script = submit("--dry-run", *own, "--", "grpo", "--config", "quickstart", "grpo.seed=7", capsys=capsys)
    assert "#SBATCH --signal=B:USR1@90\n" in script
    assert "#SBATCH --time=04:00:00\n" in script
    assert "#SBATCH --requeue\n" in script
    job = directory / "slurm_runs" / "0001"
    assert f"command=(nemo-rl run --restarts 3 --directory {job} -- grpo --config {job}/train.yaml)\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not job.exists()


def test_the_configuration_names_one_checkpoint_directory_for_all_starts(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sbatch, "submit_script", lambda script: "17")
    shown = submit("slurm.directory='jobs, new'", "--", "grpo", "--config", "quickstart", "grpo.seed=7", capsys=capsys)
    assert shown.startswith("training: job 17\n")
    job = directory / "jobs, new" / "0001"
    config = load_config(job / "train.yaml")
    assert config.grpo.seed == 7
    assert config.checkpointing.checkpoint_dir == str(job / "checkpoints")
    assert (job / "train.sbatch").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("near_end", [True, False])
def test_a_signal_near_the_end_saves_and_requeues_and_another_end_does_not(
    directory: Path, near_end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    program = directory / "program"
    body = "trap 'exit 130' TERM; touch ready; while true; do sleep 0.05; done" if near_end else "exit 7"
    program.write_text(f"#!/usr/bin/env bash\n{body}\n")
    program.chmod(0o755)
    (directory / "scontrol").write_text('#!/usr/bin/env bash\necho "$@" > requeued\n')
    (directory / "scontrol").chmod(0o755)
    text = submit("--dry-run", f"slurm.program=[{program}]", "--", "sft", "--config", "sft_quickstart", capsys=capsys)
    script = text.partition("\n")[2].replace(
        "run=$!\n", 'run=$!\nuntil [[ -e ready ]] || ! kill -0 "$run"; do :; done\n'
    )
    if near_end:
        script = script.replace("while true; do\n    status=0", "kill -USR1 $$\nwhile true; do\n    status=0")
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == (130 if near_end else 7), done.stderr
    assert (directory / "requeued").exists() == near_end
    if near_end:
        assert (directory / "requeued").read_text() == "requeue 42\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["slurm.tim=3", "--", "grpo", "--config", "quickstart"], "did you mean slurm.time?"),
        (["slurm.nodes=2", "--", "grpo", "--config", "quickstart"], "slurm.nodes = 2: unknown key"),
        (["slurm.sbatch_args=['--signal=B:TERM']", "--", "grpo", "--config", "quickstart"], "is set by the script"),
        (["--", "gpro", "--config", "quickstart"], "did you mean 'grpo'?"),
        (["--", "grpo"], "must name the recipe of grpo"),
        (["--config", "quickstart", "--", "grpo"], "belongs to the training command"),
        (["--", "grpo", "--config", "quickstart", "checkpointing.enabled=false"], "a requeued job resumes"),
        ([], "must name a recipe of `nemo-rl collect`"),
    ],
)
def test_what_no_job_can_be_made_of_is_refused_by_name(
    words: list[str], text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", *words]) == 2
    assert text in capsys.readouterr().err
    assert not list(directory.iterdir())
