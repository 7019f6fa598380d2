"""Loss and gradient of supervised training, against Hugging Face's own cross-entropy in float32, on any layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.data.supervised_samples import SupervisedSample, make_supervised_batch
from nemo_rl.losses.likelihood import NegativeLogLikelihood
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.types import TrainingBatch
from tests.contracts.layouts import plain_model
from tests.contracts.policies import SGD, clones, play
from tests.contracts.rank_pool import Mesh, RankPool
from tests.unit.policy.tiny import VOCABULARY, saved_model

pytestmark = pytest.mark.usefixtures("one_thread")

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}}
VARIANTS: dict[str, tuple[Mesh | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "packed": (None, PACKED),
    "2 ranks": (Mesh(2), {}),
    "2 ranks, packed": (Mesh(2), PACKED),
    "tp 2": (Mesh(1, 2), {}),
    "cp 2, packed": (Mesh(1, context_parallel_size=2), PACKED),
    "megatron dp 2, packed": (Mesh(2, backend="megatron"), PACKED),
    "megatron pp 2": (Mesh(1, 1, 2, backend="megatron"), {}),
    "megatron tp 2 pp 2, packed": (Mesh(1, 2, 2, backend="megatron"), PACKED),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("models"))


def conversations() -> TrainingBatch:
    """Seven of them, of two turns: the answers' tokens lie in two runs."""
    draws = np.random.default_rng(0)
    samples = []
    for length in (9, 5, 12, 7, 12, 6, 10):
        places = np.arange(length)
        mask = ((places >= 2) & (places < 4)) | (places >= length - 2)
        samples.append(SupervisedSample(draws.integers(3, VOCABULARY, length).astype(np.int32), mask))
    return make_supervised_batch(samples)


def huggingface(path: Path, batch: TrainingBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss that the library computes from labels, -100 where nothing is learned, and its gradients."""
    model = plain_model(path)
    labels = batch["token_ids"].masked_fill(batch["token_mask"] == 0, -100)
    attention_mask = (torch.arange(labels.shape[1]) < batch["lengths"][:, None]).long()
    loss = model(input_ids=batch["token_ids"], attention_mask=attention_mask, labels=labels).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_those_of_huggingface(variant: str, model: Path, pool: RankPool) -> None:
    mesh, settings = VARIANTS[variant]
    batch = conversations()
    calls = [("run_with_weights", clones), ("train_step", batch, NegativeLogLikelihood()), ("run_with_weights", clones)]
    config = {"num_samples": 7 if mesh is None else 8, "optimizer": SGD, **settings, **(mesh.config if mesh else {})}
    arguments: dict[str, Any] = {"path": model, "calls": calls, "config": config}
    before, metrics, after = play(SINGLE_RANK, **arguments) if mesh is None else pool.run(mesh, play, **arguments)[0]
    loss, gradients = huggingface(model, batch)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["global_valid_toks"] == float(batch["token_mask"].sum())
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-4, atol=1e-5)
