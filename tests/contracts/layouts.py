"""Layouts of ranks, and calls of a policy on any of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from tests.contracts.policies import SGD, Call, clones, play
from tests.contracts.rank_pool import Mesh, RankPool
from tests.unit.policy.tiny import WeightedNLL, make_batch

LENGTHS = [9, 5, 12, 3, 7, 12, 2, 6]
UNEVEN = [9, 5, 12, 3, 7, 12, 2]
FSDP2_ALONE = RankLayout(init_method="file:///nowhere")  # a group of one has nobody to find

FSDP2 = {"2 ranks": Mesh(2), "4 ranks": Mesh(4), "tp 2": Mesh(1, 2), "2 x tp 2": Mesh(2, 2)}
MEGATRON = {
    "megatron dp 2": Mesh(2, backend="megatron"),
    "megatron tp 2": Mesh(1, 2, backend="megatron"),
    "megatron pp 2": Mesh(1, 1, 2, backend="megatron"),
    "megatron tp 2 pp 2": Mesh(1, 2, 2, backend="megatron"),
}
COPIES_OF_STAGES = {"megatron dp 2 pp 2": Mesh(2, 1, 2, backend="megatron")}  # where both matter together
EXPERTS = {
    "megatron one rank": Mesh(1, backend="megatron"),
    "megatron ep 2": Mesh(2, backend="megatron", expert_parallel_size=2),
    "megatron ep 4": Mesh(4, backend="megatron", expert_parallel_size=4),
    "megatron tp 2 ep 2": Mesh(1, 2, backend="megatron", expert_parallel_size=2),
    "megatron tp 2 etp 2": Mesh(1, 2, backend="megatron", expert_tensor_parallel_size=2),
    "megatron dp 2 tp 2 ep 2": Mesh(2, 2, backend="megatron", expert_parallel_size=2),
    "megatron dp 2 pp 2 ep 2": Mesh(2, 1, 2, backend="megatron", expert_parallel_size=2),
}
MEGATRON_TOGETHER = (
    "megatron dp 2",
    "megatron tp 2 pp 2",
)  # every way at least once, where one model or call is enough
EXPERTS_OVER_RANKS = {
    "ep 2": Mesh(2, expert_parallel_size=2),
    "dp 4 ep 2": Mesh(4, expert_parallel_size=2),
    "ep 4": Mesh(4, expert_parallel_size=4),
    "ep 2 tp 2": Mesh(2, 2, expert_parallel_size=2),
}
CONTEXT = {
    "cp 2": Mesh(1, context_parallel_size=2),
    "cp 4": Mesh(1, context_parallel_size=4),
    "cp 2 dp 2": Mesh(2, context_parallel_size=2),
    "cp 2 tp 2": Mesh(1, 2, context_parallel_size=2),
    "cp 2 ep 2": Mesh(1, context_parallel_size=2, expert_parallel_size=2),
    "tp 2 sp": Mesh(1, 2, sequence_parallel=True),
    "2 x tp 2 sp": Mesh(2, 2, sequence_parallel=True),
    "cp 2 tp 2 sp": Mesh(1, 2, context_parallel_size=2, sequence_parallel=True),
    "cp auto 2": Mesh(1, context_parallel_size=2, divides_only_long=True),
    "cp auto 2 dp 2": Mesh(2, context_parallel_size=2, divides_only_long=True),
    "cp auto 2 tp 2 sp": Mesh(1, 2, context_parallel_size=2, divides_only_long=True, sequence_parallel=True),
    "megatron cp 2": Mesh(1, backend="megatron", context_parallel_size=2),
    "megatron cp 2 pp 2": Mesh(1, 1, 2, backend="megatron", context_parallel_size=2),
    "megatron cp 2 tp 2": Mesh(1, 2, backend="megatron", context_parallel_size=2),
    "megatron tp 2 sp": Mesh(1, 2, backend="megatron", sequence_parallel=True),
    "megatron tp 2 pp 2 sp": Mesh(1, 2, 2, backend="megatron", sequence_parallel=True),
    "megatron cp 2 tp 2 sp": Mesh(1, 2, backend="megatron", context_parallel_size=2, sequence_parallel=True),
    "megatron cp 2 ep 2": Mesh(1, backend="megatron", context_parallel_size=2, expert_parallel_size=2),
    "cp 2 dp 2 ep 4": Mesh(2, context_parallel_size=2, expert_parallel_size=4),
}
DENSE = FSDP2 | MEGATRON | COPIES_OF_STAGES  # layouts of every model
MULTIPLE = DENSE | EXPERTS_OVER_RANKS | EXPERTS | CONTEXT
LAYOUTS = ("plain", "fsdp2 alone", *FSDP2, *MEGATRON)
FEWER = ("plain", "fsdp2 alone", *FSDP2, *MEGATRON_TOGETHER)
SPLIT_MODELS = ("qwen2", "llama", "qwen3")  # tied, untied with biases, norms of heads
BATCHING: dict[str, dict[str, Any]] = {
    "samples": {"train_micro_batch_size": 2},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 16}},
}


class Layouts:
    """Runs calls of a policy on a layout of ranks."""

    def __init__(self, pool: RankPool, models: dict[str, Path]) -> None:
        self._pool = pool
        self._models = models
        self._kept: dict[Any, list[Any]] = {}

    def __call__(self, layout: str, model: str, *calls: Call, **config: Any) -> list[Any]:
        """Return the first rank's result of each call; metrics and log-probs are the same on all ranks."""
        if layout.startswith("megatron"):
            section = MULTIPLE[layout].config["megatron_cfg"]
            own = config.pop("dtensor_cfg", {})
            renamed = {"peft" if name == "lora_cfg" else name: value for name, value in own.items()}
            config["megatron_cfg"] = section | config.pop("megatron_cfg", {}) | renamed
        arguments: dict[str, Any] = {"path": self._models[model], "calls": calls, "config": config}
        if layout not in MULTIPLE:
            return play(SINGLE_RANK if layout == "plain" else FSDP2_ALONE, **arguments)
        first, *others = self._pool.run(MULTIPLE[layout], play, **arguments)
        for result in others:
            for (name, *_), value, expected in zip(calls, result, first, strict=True):
                assert value is None if name == "run_with_weights" else same(value, expected), name
        return first

    def learnt(self, layout: str, model: str, batching: str = "samples") -> list[Any]:
        """Log-probs, weights and metrics around one step with SGD, whose learning rate is 1; made once."""
        if (layout, model, batching) not in self._kept:
            batch = make_batch(UNEVEN)
            config = {"optimizer": SGD, "temperature": 0.7, "needs_reference": True, **BATCHING[batching]}
            reading = [("logprobs", batch), ("reference_logprobs", batch), ("run_with_weights", clones)]
            self._kept[layout, model, batching] = self(
                layout, model, *reading, ("train_step", batch, WeightedNLL()), *reading, **config
            )
        return self._kept[layout, model, batching]


def plain_model(path: Path) -> Any:
    """Hugging Face's own, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def same(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, expected)
    if isinstance(value, tuple):
        return all(same(a, b) for a, b in zip(value, expected, strict=True))
    return repr(value) == repr(expected)  # also of metrics that are not a number


def assert_near(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=atol)


def assert_same_metrics(metrics: dict[str, float], expected: dict[str, float]) -> None:
    for name in metrics.keys() - {"num_micro_batches"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
