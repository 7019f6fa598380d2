"""The policy on two ranks in processes of their own is the plain one, and ends with the cause where a rank dies."""

import asyncio
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.cluster import connect, reserve
from nemo_rl.errors import WorkerDied, WorkerError
from nemo_rl.policy.driver import LocalPolicy, PolicyWorkerGroup
from nemo_rl.tracing import span
from tests.support.kept_spans import KeptSpans, kept_spans
from tests.unit.policy.tiny import WeightedNLL, make_batch, saved_model

DEADLINE_S = 300.0
LENGTHS = [9, 5, 12, 3, 7, 12, 2, 6]
TWO_RANKS = Layout("cpu", 1, 0, (DeviceSlot(0), DeviceSlot(0)), (DeviceSlot(0),), is_split=False, needs_cluster=True)


@dataclass(frozen=True)
class NormsIn:
    """What `run_with_weights` is given to call elsewhere: says where it was, and the norm of each weight."""

    scale: float

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, dict[str, float]]:
        return os.getpid(), {name: self.scale * float(tensor.norm()) for name, tensor in weights}


def settings(path: Path) -> tuple[PolicyConfig, dict[str, Any]]:
    config = PolicyConfig.model_validate(
        {
            "model_name": str(path),
            "precision": "float32",
            "device": "cpu",
            "train_global_batch_size": len(LENGTHS),
            "train_micro_batch_size": 3,
            "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}},
        }
    )
    arguments = {"model_path": str(path), "temperature": 0.7, "needs_reference": True, "num_samples_per_step": 8}
    return config, {**arguments, "seed": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("qwen2", tmp_path_factory.mktemp("models"))


async def two_steps(policy: Any) -> dict[str, Any]:
    batch = make_batch(LENGTHS)
    first = await policy.logprobs(batch)
    metrics = [await policy.train_step(batch, WeightedNLL()) for _ in range(2)]
    await policy.offload()
    await policy.onload()
    _, norms = await policy.run_with_weights(NormsIn(2.0))
    everywhere = await policy.run_on_all_ranks(NormsIn(2.0))
    assert len({pid for pid, _ in everywhere}) == len(everywhere) == getattr(policy, "num_ranks", 1)
    assert all(found == norms for _, found in everywhere)
    return {"first": first, "metrics": metrics, "norms": norms, "logprobs": await policy.logprobs(batch)}


def test_two_ranks_are_one_and_end_with_the_cause(model: Path, tmp_path: Path) -> None:
    """One group for all claims, since its start takes seconds."""
    connect(num_cpus=2)
    config, arguments = settings(model)

    async def plain() -> dict[str, Any]:
        policy = LocalPolicy(config, **arguments)
        result = await two_steps(policy)
        await policy.close()
        return result

    async def main() -> None:
        expected = await plain()
        reservation = await reserve(TWO_RANKS, timeout_s=DEADLINE_S)
        slots = [reservation.slot(device_slot) for device_slot in TWO_RANKS.ranks]
        group = await PolicyWorkerGroup.create(config, slots=slots, timeout_s=DEADLINE_S, log_dir=tmp_path, **arguments)
        try:
            with kept_spans() as kept, span("step"):
                await equals_plain(group, expected)
            check_spans(kept)
            await loads_what_it_saved(group, tmp_path / "saved")
            await ends_with_the_cause(group)
        finally:
            await group.close()
            await group.close()
            reservation.release()

    asyncio.run(main())


def check_spans(kept: KeptSpans) -> None:
    """Each rank has a track: its calls, and in them what it did with each micro-batch, belong to the driver's step."""
    (step,) = kept.named("step")
    for rank in range(2):
        calls = [each for each in kept.named("train_step") if each.track == f"policy rank {rank}"]
        assert [each.parent_id for each in calls] == [step.span_id] * 2
        parts = [each for each in kept.named("micro_batch") if each.parent_id in {call.span_id for call in calls}]
        assert {(each.track, each.trace_id) for each in parts} == {(f"policy rank {rank}", step.trace_id)}
        assert len(parts) == 2 * 2  # four rows per rank, three per micro-batch, two steps


async def equals_plain(group: PolicyWorkerGroup, expected: dict[str, Any]) -> None:
    result = await two_steps(group)
    torch.testing.assert_close(result["first"], expected["first"], rtol=0, atol=1e-5)
    torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=0, atol=1e-4)
    for got, want in zip(result["metrics"], expected["metrics"], strict=True):
        assert got.keys() == want.keys()
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
        assert got["global_valid_toks"] == want["global_valid_toks"]
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    torch.testing.assert_close(await group.reference_logprobs(make_batch(LENGTHS)), result["first"], rtol=0, atol=0)
    assert (await group.run_with_weights(NormsIn(1.0)))[0] == (await group.pids())[0]


async def loads_what_it_saved(group: PolicyWorkerGroup, path: Path) -> None:
    batch = make_batch(LENGTHS, seed=1)
    await group.save(path, save_optimizer=True)
    after_saving = await group.train_step(batch, WeightedNLL())
    await group.load(path)
    assert await group.train_step(batch, WeightedNLL()) == after_saving


async def ends_with_the_cause(group: PolicyWorkerGroup) -> None:
    pids = await group.pids()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"policy rank 1"):
        await group.train_step(make_batch(LENGTHS), WeightedNLL())
    with pytest.raises(WorkerError, match="gone: policy rank 1"):
        await group.logprobs(make_batch(LENGTHS))
