import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.algorithms.step_histograms import MAX_VALUES, HistogramObserver, step_distributions
from nemo_rl.observability.loggers import StepTimer

MASK = torch.tensor([[0.0, 1, 1], [0, 1, 0], [0, 1, 1]])


def make_batch(**values: torch.Tensor) -> TensorDict:
    """Return three samples of two groups; the last one carries no gradient."""
    usual = {
        keys.TOKEN_MASK: MASK,
        keys.SAMPLE_MASK: torch.tensor([1.0, 1, 0]),
        keys.GENERATION_LOGPROBS: -MASK,
        keys.REWARD: torch.tensor([1.0, 0, 0.5]),
        keys.GROUP_ID: torch.tensor([4, 4, 7]),
        keys.ADVANTAGES: torch.tensor([[0.0, 1, 2], [0, 3, 9], [0, 9, 9]]),
    }
    return TensorDict(usual | values, batch_size=3)


def test_distributions_are_of_samples_groups_and_trained_tokens() -> None:
    previous = torch.tensor([[0.0, -1, 0], [0, -1 - math.log(2), 0], [0, 0, 0]])
    found = step_distributions(make_batch(**{keys.PREV_LOGPROBS: previous}))
    assert {name: values.tolist() for name, values in found.items()} == {
        "gen_tokens": [2, 1, 2],
        "reward": [1, 0, 0.5],
        "baseline_reward": [0.5, 0.5],
        "advantages": [1, 2, 3],
        "sampling_importance_ratio": pytest.approx([1, math.e, 0.5]),
    }


def test_batch_without_rewards_has_its_lengths() -> None:
    batch = make_batch()
    del batch[keys.REWARD], batch[keys.ADVANTAGES]
    assert set(step_distributions(batch)) == {"gen_tokens"}


def test_large_batch_is_sampled_evenly() -> None:
    num_tokens = MAX_VALUES * 2 + 10
    shape = torch.ones(3, num_tokens)
    batch = make_batch(
        **{
            keys.TOKEN_MASK: shape,
            keys.GENERATION_LOGPROBS: shape,
            keys.ADVANTAGES: shape,
            keys.SAMPLE_MASK: torch.ones(3),
        }
    )
    found = step_distributions(batch)["advantages"]
    assert MAX_VALUES // 2 < len(found) <= MAX_VALUES


def test_observer_names_each_distribution_and_its_step() -> None:
    logged = {}
    target = SimpleNamespace(log_histogram=lambda name, values, step: logged.update({name: (step, values)}))
    training = SimpleNamespace(position=SimpleNamespace(step=5))
    observer = HistogramObserver(target, training)  # type: ignore[arg-type]
    asyncio.run(observer.after_training(StepBatch(make_batch(), (), {}), StepTimer()))
    assert logged["train/reward/histogram"] == (5, [1.0, 0.0, 0.5])
    assert set(logged) == {
        f"train/{name}/histogram" for name in ("gen_tokens", "reward", "baseline_reward", "advantages")
    }
