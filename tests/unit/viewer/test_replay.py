import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.viewer.check_command import CHECK
from nemo_rl.viewer.replay import ReplayedNumber, read_trajectory, replay

ROOT = Path(__file__).parents[3]
SMALL = (
    "grpo.num_prompts_per_step=1",
    "grpo.num_generations_per_prompt=2",
    "grpo.adv_estimator.use_leave_one_out_baseline=false",
    "policy.train_global_batch_size=2",
    "policy.train_micro_batch_size=2",
    "rollout.write_token_ids=true",
)
LOGGED = {
    "train/loss": 0.1,
    "train/reward": 2.0,
    "train/total_num_tokens": 8,
    "train/advantages/max": 0.70711,
    "train/advantages/min": -0.70711,
    "train/advantages/mean": -0.70711 / 3,  # two sampled tokens of the reward 1, one of the reward 3
}


def row(index: int, reward: float, num_tokens: int) -> dict[str, Any]:
    """A line of step 2: two prompt tokens, then `num_tokens` sampled ones."""
    return {
        "step": 2,
        "group_id": "g",
        "prompt_id": "p",
        "dataset": "",
        "task_name": "math",
        "generation_index": index,
        "stop_reason": "done",
        "reward": reward,
        "rewards": {"score": reward},
        "failure": None,
        "num_turns": 1,
        "messages": [
            {"role": "user", "content": "?", "token_ids": [5, 6]},
            {
                "role": "assistant",
                "content": "!",
                "token_ids": [7] * num_tokens,
                "generation_logprobs": [-1.0] * num_tokens,
            },
        ],
    }


def make_run(directory: Path, *overrides: str, **logged: float) -> Path:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", (*SMALL, *overrides))
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(resolved_yaml(config))
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 2, **LOGGED, **logged}) + "\n")
    lines = [row(0, 1.0, 2), row(1, 3.0, 1), {**row(2, 9.0, 1), "step": 3}]
    lines[0]["messages"][0]["token_ids"] = [5, 6, 6]
    (directory / "rollouts/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_advantages_of_a_stored_step_are_computed_again(tmp_path: Path) -> None:
    result = replay(make_run(tmp_path / "run"), 2)
    assert {c.name for c in result.comparisons} == {name for name in LOGGED if name != "train/loss"}
    assert all(c.agrees for c in result.comparisons), result
    assert result.no_loss_because == "there is no checkpoint of step 1, whose weights sampled the step"


def test_a_number_that_differs_is_reported_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", **{"train/advantages/max": 0.7})
    assert run_command(CHECK, [str(run), "--replay", "2"]) is ExitCode.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "DIFFERS" in line] == ["train/advantages/max"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.write_token_ids=false", "rollout.write_token_ids"),
        ("policy.generation.top_k=5", "rollout.write_token_columns"),
        ("grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
        ("grpo.invalid_tool_call_advantage=-1", "grpo.invalid_tool_call_advantage"),
        ("reward_penalties.penalize_empty_final_answer=true", "reward_penalties.penalize_empty_final_answer"),
    ],
)
def test_what_the_rollouts_do_not_tell_is_refused(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        replay(make_run(tmp_path / "run", override), 2)
    assert error.value.key == key


def test_files_that_lack_the_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl has no training step 7"):
        replay(make_run(tmp_path / "run"), 7)
    with pytest.raises(ConfigError, match=r"no run directory: it has no config\.yaml"):
        replay(tmp_path, 1)


def test_logprobs_that_json_lacks_are_minus_infinity() -> None:
    stored = row(0, 1.0, 2)
    stored["messages"][1]["generation_logprobs"] = [None, -1.0]
    assert read_trajectory(stored).message_log[1].generation_logprobs == (-math.inf, -1.0)


def test_nan_agrees_with_nothing() -> None:
    assert ReplayedNumber("train/loss", 1.0, 1.0 + 5e-6, 1e-5).agrees
    assert not ReplayedNumber("train/loss", 1.0, 1.0 + 5e-5, 1e-5).agrees
    assert not ReplayedNumber("train/loss", math.nan, math.nan, 1e-5).agrees
