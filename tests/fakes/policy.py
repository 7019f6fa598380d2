"""A policy without a model, and the refit of an engine without weights; both write down what is asked of them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_rl import batch as keys
from nemo_rl.interfaces import DeviceTurns, Generation, LossFn, OffloadPart, Policy
from nemo_rl.loss_types import TokenScores, TopK
from nemo_rl.policy.micro_batches import count_valid
from nemo_rl.types import TrainingBatch

ResultT = TypeVar("ResultT")
LEARNING_RATE = 0.5


class FakePolicy:
    """Its log-probs are those of the engine. Its weights are the number of steps that it was trained for.

    `train_step` evaluates the loss and reports what a policy reports; `on_train_step` is called first. The calls'
    names go to `calls`, the batches trained on to `batches`. A save that it writes slowly takes until `finish_save`.
    """

    def __init__(self, calls: list[str] | None = None, *, on_train_step: Callable[[int], None] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.batches: list[TrainingBatch] = []
        self.num_steps = 0
        self.writes_slowly = True
        self._on_train_step = on_train_step or (lambda step: None)

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        self.calls.append("logprobs")
        return batch[keys.GENERATION_LOGPROBS].clone()

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        self.calls.append("reference_logprobs")
        return batch[keys.GENERATION_LOGPROBS].clone()

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        self.calls.append("topk_logprobs")
        ids = torch.arange(k).expand(*batch[keys.TOKEN_IDS].shape, k)
        return TopK(ids, torch.full(ids.shape, 1 / k).log())

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        self._on_train_step(self.num_steps + 1)
        self.calls.append("train_step")
        self.batches.append(batch)
        self.num_steps += 1
        normalizer = count_valid(batch, torch.arange(len(batch)))
        loss, metrics = loss_fn(TokenScores(batch[keys.GENERATION_LOGPROBS]), batch, normalizer)
        return {name: float(metric.value) for name, metric in metrics.items()} | {
            "loss": float(loss),
            "grad_norm": 1.0,
            "lr": LEARNING_RATE,
            "global_valid_seqs": normalizer.num_valid_trajectories,
            "global_valid_toks": normalizer.num_valid_tokens,
        }

    async def recorded_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        self.calls.append("recorded_logprobs")
        return batch[keys.GENERATION_LOGPROBS][batch[keys.RECORDED] >= 0]

    async def select(self, name: str) -> None:
        raise NotImplementedError

    async def run_with_weights(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> ResultT:
        return use([("num_steps", torch.tensor(self.num_steps))])

    async def run_on_all_ranks(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> Sequence[ResultT]:
        return [await self.run_with_weights(use)]

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        self.calls.append("save")
        _write(path, str(self.num_steps))

    async def has_written_save(self) -> bool:
        return not self.writes_slowly

    async def finish_save(self) -> None:
        self.calls.append("finish_save")

    async def load(self, path: Path) -> None:
        self.calls.append("load")
        self.num_steps = int(_read(path))

    async def offload(self, *parts: OffloadPart) -> None:
        self.calls.append(" ".join(["offload", *parts]))

    async def onload(self, *parts: OffloadPart) -> None:
        self.calls.append(" ".join(["onload", *parts]))

    async def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    async def device_bytes(self) -> int:
        return 80 << 30

    async def close(self) -> None:
        self.calls.append("close")


class FakeWeightSync:
    """Tells a FakeGeneration its version, and writes each down."""

    keeps_versions = False

    def __init__(self, calls: list[str] | None = None) -> None:
        self.calls = [] if calls is None else calls

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        async with turns.delivery() if turns else nullcontext():
            self.calls.append(f"publish {weight_version}")
            engine: Any = generation
            engine.weight_version = weight_version

    def close(self) -> None:
        self.calls.append("close")


def _write(path: Path, text: str) -> None:
    path.mkdir()
    (path / "num_steps").write_text(text)


def _read(path: Path) -> str:
    return (path / "num_steps").read_text()
