"""Real harnesses train a policy on repositories with a bug: 20 steps, minutes each; tests/support/patch_policy.py."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from nemo_rl.environments.ecosystem.harbor import HarborConfig
from nemo_rl.environments.ecosystem.relayed_port import interpreter_directories
from tests.contracts.test_harbor import has_containers
from tests.functional import cli
from tests.functional.cli import run_command_line
from tests.functional.recorded_tokens import sampled_calls, trained_calls
from tests.support.harness_sessions import DIRECTORY, INSTALLED, find_harness, load_entry
from tests.support.patch_policy import BUGS, demonstrate, teach, write_tasks

STEPS = 20
DEADLINE_S = 3000.0
SCRIPT = Path(__file__).with_name("recorded_grpo.py")
SETTINGS = {"mini_swe_agent": (4, 1.0e-3), "codex": (4, 1.0e-3)}  # rollouts per task and step, learning rate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not has_containers(), reason="bubblewrap starts no container on this machine"),
]


def entry_of(name: str, program: str) -> dict[str, Any]:
    """Return the entry of a harness's file with the paths of this machine."""
    entry = load_entry(name)
    root = next((path for path in Path(program).parents if (path / "node_modules").is_dir()), Path(program).parents[1])
    mounts = [str(root), str(Path(program).resolve().parent), *interpreter_directories()]
    return entry | {"command": [program, *entry["command"][1:]], "mounts": mounts, "max_concurrency": 3}


def recipe(directory: Path, name: str, entry: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write the recipe of a training on the tasks in `directory`; return its path."""
    longest = 2 * facts["tokens"] + 256
    generations, learning_rate = SETTINGS[name]
    rows = len(BUGS) * generations
    config = {
        "defaults": str(Path(cli.ROOT) / "examples" / "configs" / "quickstart.yaml"),
        "grpo": {"num_prompts_per_step": len(BUGS), "num_generations_per_prompt": generations}
        | {"max_num_steps": STEPS, "val_period": 0, "val_at_start": False, "val_at_end": False},
        "policy": {"model_name": str(directory / "model"), "max_total_sequence_length": longest}
        | {"train_micro_batch_size": rows, "optimizer": {"kwargs": {"lr": learning_rate}}}
        | {"generation": {"max_new_tokens": 64, "vllm_cfg": {"max_num_seqs": 16}}},
        "data": {
            "train": {"dataset_name": "harbor", "data_path": str(directory / "tasks"), "env_name": name}
            | {"task": None, "task_kwargs": {}, "size": None},
            "validation": None,
        },
        "env": {name: entry},
        "rollout": {"write_token_ids": True},
        "checkpointing": {"enabled": False, "metric_name": None},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("name", SETTINGS)
def test_a_harness_trains_a_policy_to_choose_the_right_patch(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    program = find_harness(name)
    if program is None:
        pytest.skip(f"{name} is not installed, neither in PATH nor in ${INSTALLED} ({DIRECTORY})")
    entry = entry_of(name, program)
    tasks = write_tasks(tmp_path / "tasks")
    section = HarborConfig(**{key: value for key, value in entry.items() if key != "type"})
    facts = teach(tmp_path / "model", demonstrate(section, tasks))
    record = tmp_path / "record.jsonl"
    config = f"--config={recipe(tmp_path, name, entry, facts)}"
    run = run_command_line(SCRIPT, tmp_path / "logs", config, deadline_s=DEADLINE_S, RECORD=str(record))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert run.directory is not None
    rows = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS * len(BUGS) * SETTINGS[name][0]
    assert [row["failure"] for row in rows if row["failure"]] == []
    sampled, trained = sampled_calls(record), trained_calls(rows)
    side_calls = sampled - trained
    assert trained - sampled == Counter()
    rewards = [run.metrics()[step]["train/reward"] for step in range(1, STEPS + 1)]
    for what, value in (*facts.items(), ("rewards", rewards), ("calls", trained.total())):
        record_property(what, value)
    assert not side_calls or "side_calls" in entry
    assert rewards[0] < 0.7  # begins by guessing
    assert mean(rewards[-5:]) >= 0.9
