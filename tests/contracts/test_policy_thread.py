"""The policy in this process, on a thread of its own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.interfaces import Policy
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.policy.driver import LocalPolicy
from tests.contracts.layouts import LENGTHS, Layouts
from tests.contracts.policies import SETTINGS, clones
from tests.unit.policy.tiny import WeightedNLL, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def on_a_thread(path: Path, **config: Any) -> LocalPolicy:
    settings = {"model_name": str(path), "train_global_batch_size": 8, **SETTINGS, **config}
    return LocalPolicy(
        PolicyConfig.model_validate(settings),
        model_path=str(path),
        temperature=1.0,
        needs_reference=True,
        num_samples_per_step=8,
        seed=0,
    )


def test_policy_on_a_thread_gives_what_its_rank_gives(run: Layouts, models: dict[str, Path], tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)
    step = ("train_step", batch, WeightedNLL())
    expected = run("plain", "qwen2", ("logprobs", batch), step, ("run_with_weights", clones))

    async def use(policy: Policy) -> list[Any]:
        results = [await policy.reference_logprobs(batch), await policy.train_step(batch, WeightedNLL())]
        await policy.save(tmp_path, save_optimizer=True)
        while not await policy.has_written_save():  # noqa: ASYNC110 - until the disk has it
            await asyncio.sleep(0.01)
        assert (tmp_path / "optimizer" / ".metadata").exists()
        await policy.finish_save()
        await policy.train_step(batch, WeightedNLL())
        await policy.offload()
        await policy.onload()
        await policy.load(tmp_path)
        results.append(await policy.run_with_weights(clones))
        await policy.close()
        return results

    logprobs, metrics, weights = asyncio.run(use(on_a_thread(models["qwen2"])))
    # Another process places its tensors elsewhere, and on some processors a matrix product rounds by the alignment.
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
    assert metrics == pytest.approx(expected[1], rel=1e-5)
    for name, weight in expected[2].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)


def test_event_loop_goes_on_during_a_training_step(models: dict[str, Path]) -> None:
    """The loss waits, on the policy's thread, for something that only the event loop can do."""

    async def main() -> float:
        loop = asyncio.get_running_loop()

        class Waiting(WeightedNLL):
            def __call__(self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer) -> Any:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=120)
                return super().__call__(scores, batch, normalizer)

        policy = on_a_thread(models["llama"])
        metrics = await policy.train_step(make_batch(LENGTHS), Waiting())
        await policy.close()
        return metrics["num_optimizer_steps"]

    assert asyncio.run(main()) == 1
