import pytest

from nemo_rl.algorithms.stages import batch_metrics
from tests.unit.algorithms.batches import make_batch


def test_batch_metrics_count_a_trajectory_once_and_valid_tokens_only() -> None:
    batch = make_batch(
        [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]],
        trajectory_id=[0, 0, 1],
        rewards=[2.0, 2.0, -1.0],
        components={"right": [1.0, 1.0, 0.0], "format": [0.5, 0.5, 0.0]},
        advantages=[[9.0, 9.0, 1.0, 1.0], [9.0, 1.0, 9.0, 1.0], [9.0, 9.0, 9.0, -2.0]],
    )
    assert batch_metrics(batch) == pytest.approx(
        {
            "reward": 0.75,
            "filtered_reward": 0.75,
            "shaped_reward": 0.5,
            "mean_prompt_length": 2.5,
            "total_num_tokens": 12.0,
            "advantages/mean": 0.4,
            "advantages/max": 1.0,
            "advantages/min": -2.0,
        }
    )


def test_a_batch_without_advantages_or_without_sampled_tokens_has_metrics() -> None:
    batch = make_batch([[0, 0, 0]])
    assert batch_metrics(batch)["mean_prompt_length"] == 3
    assert batch_metrics(batch)["advantages/max"] == 0
    assert "advantages/mean" not in batch_metrics(batch.exclude("advantages"))
