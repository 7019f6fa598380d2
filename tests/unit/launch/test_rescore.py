import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.loading import load_config
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.scoring import Scoring, rescore_rollouts
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.launch.rescore import rescore_file
from nemo_rl.launch.rollouts import load_prompts
from nemo_rl.types import Failure, FailureClass, Message, Prompt, StopReason, TokenizedMessage, Trajectory

HERE = "tests.unit.launch.test_rescore"


def length(messages: Sequence[dict[str, str]], metadata: dict[str, Any]) -> float:
    if messages[-1]["content"] == "":
        raise ValueError("nothing said")
    return float(len(messages[-1]["content"]))


@pytest.fixture
def config(tmp_path: Path) -> GRPORunConfig:
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(3)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
grpo: {{num_prompts_per_step: 1, num_generations_per_prompt: 2}}
policy: {{model_name: none, train_global_batch_size: 2, train_micro_batch_size: 2}}
data: {{train: {{dataset_name: jsonl, data_path: {data}, input_key: question, output_key: answer}},
        default: {{env_name: math}}}}
env: {{math: {{scorers: [length]}}}}
scorers: {{length: {{type: function, function: "{HERE}:length", weight: 0.5}}}}
"""
    )
    return load_config(recipe, [])


def stored(config: GRPORunConfig, path: Path) -> list[dict[str, Any]]:
    """Four rollouts: rewarded, rewarded by the scorer before, failed for want of a reward, failed in generation."""
    train, _ = load_prompts(config)
    outcomes: list[tuple[str, dict[str, float], Failure | None]] = [
        ("four", {"math": 1.0}, None),
        ("five5", {"math": 0.0, "length": 99.0}, None),
        ("six", {}, Failure(FailureClass.REWARD, "judge: no score")),
        ("", {}, Failure(FailureClass.INFRA, "died")),
    ]
    with RolloutWriter(path) as writer:
        writer.write(
            1,
            [
                Trajectory(
                    prompt=train.prompts[i % 3],
                    group_id=f"0:{i}",
                    generation_index=0,
                    message_log=(TokenizedMessage(Message("assistant", text), ()),),
                    stop_reason=StopReason.FAILED if failure else StopReason.TRUNCATED,
                    rewards=rewards,
                    failure=failure,
                )
                for i, (text, rewards, failure) in enumerate(outcomes)
            ],
        )
    return rows_of(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_take_the_place_of_their_name_and_what_failed_otherwise_stays(
    config: GRPORunConfig, tmp_path: Path
) -> None:
    before = stored(config, tmp_path / "train.jsonl")
    means = rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")
    after = rows_of(tmp_path / "out.jsonl")
    assert [row["rewards"] for row in after] == [
        {"math": 1.0, "length": 2.0},
        {"math": 0.0, "length": 2.5},
        {},
        {},
    ]
    assert [row["reward"] for row in after] == [3.0, 2.5, None, None]
    assert after[2:] == before[2:]  # what math gave to the third is not stored
    assert [row["messages"] for row in after] == [row["messages"] for row in before]
    assert [row["stop_reason"] for row in after] == ["truncated", "truncated", "failed", "failed"]
    assert str(means[0]) == "mean reward 50.0000 over 2 rollouts, 2 failed"
    assert str(means[1]) == "mean reward 2.7500 over 2 rollouts, 2 failed"
    with pytest.raises(ConfigError, match="exists already"):
        rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")


def test_what_failed_for_want_of_a_score_is_scored_anew_where_rewards_are_scores_alone(
    config: GRPORunConfig, tmp_path: Path
) -> None:
    recipe = (tmp_path / "recipe.yaml").read_text().replace("{math: {scorers", "{math: {type: reward_model, scorers")
    (tmp_path / "recipe.yaml").write_text(recipe)
    config = load_config(tmp_path / "recipe.yaml", [])
    stored(config, tmp_path / "train.jsonl")
    rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")
    after = rows_of(tmp_path / "out.jsonl")
    assert [row["reward"] for row in after[2:]] == [1.5, None]
    assert [row["stop_reason"] for row in after[2:]] == ["done", "failed"]


def test_a_failed_rollout_of_a_task_without_scorers_does_not_become_a_reward_of_zero(tmp_path: Path) -> None:
    prompt = Prompt("p", "unscored", (Message("user", "q"),), dataset="set")
    row = {
        "dataset": "set", "prompt_id": "p", "group_id": "0:p:0", "generation_index": 0, "messages": [], "rewards": {},
        "reward": None, "answer": None, "stop_reason": "failed", "failure": {"class": "reward", "cause": "no score"},
    }  # fmt: skip

    async def main() -> list[dict[str, Any]]:
        prompts = {("set", "p"): prompt}
        rows = rescore_rollouts([row], prompts, Scoring(), scorer_only_tasks=("unscored",), stall_timeout_s=60)
        return [one async for one in rows]

    assert asyncio.run(main()) == [row]


def test_rollouts_of_other_data_are_refused_and_no_output_appears(config: GRPORunConfig, tmp_path: Path) -> None:
    rows = stored(config, tmp_path / "train.jsonl")
    (tmp_path / "other.jsonl").write_text(json.dumps({**rows[0], "prompt_id": "unknown"}) + "\n")
    with pytest.raises(DataError, match="prompt unknown is not in the dataset"):
        rescore_file(config, tmp_path / "other.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "none.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="not a line of a rollouts file"):
        rescore_file(config, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
