"""A ledger of the bytes on a device that policy and engine share, over the real loop, placement and refit."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import RequiredLogprobs
from nemo_rl.algorithms.loop import train
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.launch.memory_plan import CONTEXT_BYTES, GB, SLEEPING_BYTES, RunMemory
from nemo_rl.types import GenerationRequest
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.fakes.generation import FakeGeneration
from tests.fakes.policy import FakePolicy
from tests.unit.algorithms import run_setup
from tests.unit.launch.cuda_recipes import CUDA_RECIPES, downloaded, run_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("downloaded")
SHARED = [recipe for recipe in CUDA_RECIPES if "sft" not in recipe]
POLICY_PARTS = ("weights", "optimizer", "reference")


class Ledger:
    """What is on the device, in bytes; more than it has is an error at once."""

    def __init__(self, capacity: int) -> None:
        self.held = {"contexts": 2 * CONTEXT_BYTES}
        self.largest = 0
        self._capacity = capacity

    def hold(self, **parts: int) -> None:
        self.held |= parts
        total = sum(self.held.values())
        self.largest = max(self.largest, total)
        assert total <= self._capacity, {name: round(size / GB, 1) for name, size in self.held.items()}

    def free(self, *names: str) -> None:
        for name in names:
            self.held.pop(name, None)

    @asynccontextmanager
    async def during(self, **parts: int) -> AsyncIterator[None]:
        self.hold(**parts)
        await asyncio.sleep(0)
        yield
        self.free(*parts)


class LedgerPolicy(FakePolicy):
    """A policy that owns bytes: its weights and reference from the start, the optimizer's state from the first step."""

    def __init__(self, ledger: Ledger, memory: RunMemory, calls: list[str] | None = None, **_: Any) -> None:
        super().__init__(calls)
        self._ledger, self._model = ledger, memory.policy
        self._sizes = {"weights": self._model.weights, "optimizer": 0, "reference": self._model.reference}
        ledger.hold(**self._sizes)

    async def offload(self, *parts: Any) -> None:
        self._ledger.free(*(parts or POLICY_PARTS))

    async def onload(self, *parts: Any) -> None:
        self._ledger.hold(**{name: self._sizes[name] for name in parts or POLICY_PARTS})

    async def logprobs(self, batch: Any) -> Any:
        assert "weights" in self._ledger.held
        async with self._ledger.during(scoring=self._model.scoring_temporary):
            return await super().logprobs(batch)

    async def reference_logprobs(self, batch: Any) -> Any:
        assert "reference" in self._ledger.held
        async with self._ledger.during(scoring=self._model.scoring_temporary):
            return await super().reference_logprobs(batch)

    async def train_step(self, batch: Any, loss_fn: Any) -> dict[str, float]:
        assert self._ledger.held.keys() >= {*POLICY_PARTS}
        model = self._model
        self._sizes["optimizer"] = model.optimizer
        self._ledger.hold(optimizer=model.optimizer)
        working = model.activations + model.training_gathered
        async with self._ledger.during(gradients=model.gradients, working=working):
            return await super().train_step(batch, loss_fn)

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        assert self._ledger.held.keys() >= {"weights", "optimizer"}
        await super().save(path, save_optimizer=save_optimizer)


class LedgerGeneration(FakeGeneration):
    """An engine that owns bytes: its weights, and a cache that takes the rest of its share."""

    def __init__(self, ledger: Ledger, memory: RunMemory) -> None:
        super().__init__(vocab_size=run_setup.VOCAB_SIZE)
        assert memory.engine is not None
        self._ledger = ledger
        weights = memory.engine.weights
        self._sizes = {
            "engine_weights": weights,
            "kv_cache": int(memory.engine.utilization * memory.capacity) - weights,
        }
        self.holds_weights = True  # not only memory for them
        ledger.hold(**self._sizes)

    def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        assert self._ledger.held.keys() >= {*self._sizes}, "the engine is asked while it sleeps"
        assert self.holds_weights, "the engine is asked before it has weights"
        return super().generate(requests)

    async def sleep(self, *, discards_weights: bool = False) -> None:
        self._ledger.free(*self._sizes)
        self._ledger.hold(sleeping=SLEEPING_BYTES)
        self.holds_weights = self.holds_weights and not discards_weights

    async def wake(self, *parts: Any) -> None:
        names = {"weights": "engine_weights", "kv_cache": "kv_cache"}
        awake = [names[part] for part in parts or names]
        self._ledger.hold(**{name: self._sizes[name] for name in awake})
        if self._ledger.held.keys() >= {*self._sizes}:
            self._ledger.free("sleeping")


class LedgerTransport:
    """A transport that holds a copy from staging to delivery."""

    def __init__(self, ledger: Ledger, memory: RunMemory, engine: LedgerGeneration) -> None:
        self._ledger, self._bytes, self._engine = ledger, memory.transport, engine

    async def stage(self, policy: Any) -> Any:
        assert "weights" in self._ledger.held
        self._ledger.hold(transport=self._bytes)

    async def deliver(self, policy: Any, generation: Any, staged: Any, weight_version: int) -> None:
        assert self._ledger.held.keys() >= {"weights", "engine_weights"}
        await asyncio.sleep(0)
        self._engine.holds_weights = True
        self._engine.weight_version = weight_version
        self._ledger.free("transport")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("gigabytes", [80, 141])
@pytest.mark.parametrize("recipe", SHARED)
def test_three_steps_never_exceed_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, gigabytes: int
) -> None:
    memory = run_memory(recipe, gigabytes)
    ledger = Ledger(memory.capacity)
    monkeypatch.setattr(
        run_setup, "FakePolicy", lambda calls, **options: LedgerPolicy(ledger, memory, calls, **options)
    )
    engine = LedgerGeneration(ledger, memory)
    config = run_setup.make_config(grpo={"max_num_steps": 3, "val_period": 1}, checkpointing={"save_period": 1})
    needed = RequiredLogprobs(previous=True, reference=True)
    rig = run_setup.make_rig(tmp_path, config, generation=engine, shares_device=True, needed=needed)
    transport: Any = LedgerTransport(ledger, memory, engine)
    sync = TransportWeightSync([(1, 2)], WeightSyncConfig(verify=True), "bfloat16", transport=transport)
    run = replace(rig.run, weight_sync=sync)
    progress = asyncio.run(train(run))
    assert progress.position.step == 3
    assert ledger.held.keys() == {"contexts", "engine_weights", "kv_cache"}  # as generation finds it
    planned = max(moment.total for moment in memory.devices()["policy and engine"])
    assert ledger.largest <= planned
