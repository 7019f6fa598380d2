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
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.launch.memory_plan import CONTEXT_BYTES, GB, SLEEPING_BYTES, RunMemory
from nemo_rl.types import GenerationRequest
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.fakes.generation import FakeGeneration
from tests.fakes.policy import FakePolicy
from tests.unit.algorithms import run_setup
from tests.unit.launch.cuda_recipes import CUDA_RECIPES, downloaded, run_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("downloaded")
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
    """A policy that owns bytes: its weights and reference from the start, the optimizer's state from the first step.

    What a pass has used stays in the allocator's cache, which the next pass of that kind uses again.
    """

    def __init__(self, ledger: Ledger, memory: RunMemory, calls: list[str] | None = None, **_: Any) -> None:
        super().__init__(calls)
        self._ledger, self._model = ledger, memory.policy
        self._sizes = {"weights": self._model.weights, "optimizer": 0, "reference": self._model.reference}
        ledger.hold(**self._sizes)

    async def offload(self, *parts: Any) -> None:
        self._ledger.free(*(parts or POLICY_PARTS), "cache")

    async def empty_cache(self) -> None:
        await super().empty_cache()
        self._ledger.free("cache")

    async def onload(self, *parts: Any) -> None:
        self._ledger.hold(**{name: self._sizes[name] for name in parts or POLICY_PARTS})

    async def logprobs(self, batch: Any) -> Any:
        assert "weights" in self._ledger.held
        async with self._passing(scoring=self._model.scoring):
            return await super().logprobs(batch)

    async def reference_logprobs(self, batch: Any) -> Any:
        assert "reference" in self._ledger.held
        async with self._passing(scoring=self._model.scoring):
            return await super().reference_logprobs(batch)

    async def train_step(self, batch: Any, loss_fn: Any) -> dict[str, float]:
        assert self._ledger.held.keys() >= {*POLICY_PARTS}
        model = self._model
        self._sizes["optimizer"] = model.optimizer
        self._ledger.hold(optimizer=model.optimizer)
        working = model.activations + model.gathered
        async with self._passing(gradients=model.gradients, working=working):
            return await super().train_step(batch, loss_fn)

    @asynccontextmanager
    async def _passing(self, **parts: int) -> AsyncIterator[None]:
        cached = self._ledger.held.pop("cache", 0)
        async with self._ledger.during(**parts, rest_of_cache=max(0, cached - sum(parts.values()))):
            yield
        self._ledger.hold(cache=max(cached, sum(parts.values())))

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


def train_in_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: RunMemory, num_steps: int) -> Ledger:
    """Run the real loop, placement and refit over models that own the plan's bytes; return what they left behind."""
    ledger = Ledger(memory.capacity)
    monkeypatch.setattr(
        run_setup, "FakePolicy", lambda calls, **options: LedgerPolicy(ledger, memory, calls, **options)
    )
    engine = LedgerGeneration(ledger, memory)
    config = run_setup.make_config(grpo={"max_num_steps": num_steps, "val_period": 1}, checkpointing={"save_period": 1})
    needed = RequiredLogprobs(previous=True, reference=True)
    rig = run_setup.make_rig(
        tmp_path, config, generation=engine, shares_device=memory.takes_turns, stays_with_engine=not memory.takes_turns,
        needed=needed,
    )  # fmt: skip
    transport: Any = LedgerTransport(ledger, memory, engine)
    sync = TransportWeightSync([(1, 2)], WeightSyncConfig(verify=True), "bfloat16", transport=transport)
    run = replace(rig.run, weight_sync=sync)
    progress = asyncio.run(train(run))
    assert progress.position.step == num_steps
    planned = max(moment.total for moment in memory.devices()["policy and engine"])
    assert ledger.largest <= planned
    return ledger


@pytest.mark.parametrize("gigabytes", [80, 141])
@pytest.mark.parametrize("recipe", CUDA_RECIPES)
def test_three_steps_never_exceed_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, gigabytes: int
) -> None:
    memory = run_memory(recipe, gigabytes)
    if not memory.takes_turns:
        return
    ledger = train_in_ledger(tmp_path, monkeypatch, memory, 3)
    assert ledger.held.keys() == {"contexts", "engine_weights", "kv_cache"}  # as generation finds it


def tightest(*overrides: str) -> RunMemory:
    """Return the main recipe on the smallest devices on which the plan keeps policy and engine together."""
    memory = run_memory("examples/configs/grpo_math_1B.yaml", 1000, *overrides)
    assert memory.engine is not None
    share = memory.engine.utilization
    largest = max(moment.total for moment in memory.devices()["policy and engine"])
    tight = replace(memory, capacity=int((largest - share * memory.capacity) / (1 - share)) + GB // 100)
    assert not tight.takes_turns
    assert replace(tight, capacity=int(0.99 * tight.capacity)).takes_turns
    return tight


ADAPTERS = (  # little besides the weights, so that the transport is more than the plan allows for fragmentation
    "policy.model_name=Qwen/Qwen2.5-7B",
    "++policy.dtensor_cfg={lora_cfg: {enabled: true}, activation_checkpointing: true, keep_unsharded: false}",
    "policy.sequence_packing={enabled: true, train_mb_tokens: 2048, logprob_mb_tokens: 2048}",
)


@pytest.mark.parametrize("overrides", [(), ("cluster.gpus_per_node=8",), ADAPTERS])
def test_two_refits_with_both_on_the_device_never_exceed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    ledger = train_in_ledger(tmp_path, monkeypatch, tightest(*overrides), 1)  # a refit before it, and one after it
    assert {"engine_weights", "kv_cache", *POLICY_PARTS} <= ledger.held.keys()


def test_a_refit_beside_the_cache_of_training_would_exceed_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(self: LedgerPolicy) -> None:
        pass

    monkeypatch.setattr(LedgerPolicy, "empty_cache", keep)
    with pytest.raises(AssertionError, match="engine_weights"):  # more than the device has
        train_in_ledger(tmp_path, monkeypatch, tightest(*ADAPTERS), 1)
