import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config.run import WandbConfig
from nemo_rl.observability.loggers import WandbLogger, has_api_key


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_without_a_key_the_run_is_written_offline(
    no_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "250")  # a busy machine starts W&B's process slowly
    logger = WandbLogger(WandbConfig(project="words", tags=["test"]), tmp_path, {"grpo": {"seed": 42}})
    logger.log_metrics({"train/loss": 0.5, "timing/train/generation": 0.1}, 3)
    logger.log_metrics({"validation/accuracy": 0.25, "timing/validation/total_validation_time": 2.0}, 3)
    logger.log_table("validation/samples", ("prompt", "reward"), [("a", 1.0), ("b", "failed: x")], 3)
    logger.close()

    records = inspect(tmp_path / "wandb")
    [run] = [r["run"] for r in records if r["type"] == "run"]
    assert (run["project"], run["display_name"]) == ("words", tmp_path.name)
    assert run["run_id"] == (tmp_path / "wandb_run_id").read_text()
    assert run["config"]["update"]["grpo"] == {"seed": 42}
    steps = {r["metric"]["glob_name"]: r["metric"]["step_metric"] for r in records if r["type"] == "metric"}
    assert steps["train/*"] == steps["timing/train/*"] == steps["performance/*"] == "train/step"
    assert steps["validation/*"] == steps["timing/validation/*"] == "validation/step"
    history = [without_own(r["history"]["item"]) for r in records if r["type"] == "history"]
    assert history[:2] == [
        {"train/step": 3, "train/loss": 0.5, "timing/train/generation": 0.1},
        {"validation/step": 3, "validation/accuracy": 0.25, "timing/validation/total_validation_time": 2.0},
    ]
    assert history[2]["validation/step"] == 3
    [table] = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["a", 1.0], ["b", "failed: x"]]


def inspect(folder: Path) -> list[dict]:
    """The records of the run under `folder`, by W&B's own reader."""
    [path] = folder.rglob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def without_own(item: dict) -> dict:
    """A history item without the keys that W&B adds."""
    return {name: value for name, value in item.items() if not name.startswith("_")}


def test_a_key_is_found_in_the_environment_or_in_netrc(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_api_key()
    no_key.write_text("machine example.org login user password x\n")
    no_key.chmod(0o600)
    assert not has_api_key()
    no_key.write_text("machine api.wandb.ai login user password x\n")
    assert has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
    assert not has_api_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_api_key()


def test_a_broken_netrc_is_no_key(no_key: Path) -> None:
    no_key.write_text("machine\n")
    assert not has_api_key()
