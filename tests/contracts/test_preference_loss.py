"""Log-probs, loss and gradient of DPO against Hugging Face's model in float32, on any layout and batching."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from nemo_rl import batch as keys
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.data.supervised_samples import PairSample, SupervisedSample, make_pair_batch
from nemo_rl.losses.preference import PreferenceLoss
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.types import TrainingBatch
from tests.contracts.layouts import plain_model
from tests.contracts.policies import SGD, clones, play
from tests.contracts.rank_pool import Mesh, RankPool
from tests.unit.policy.tiny import VOCABULARY, saved_model

pytestmark = pytest.mark.usefixtures("one_thread")

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}}
PADDED = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
VARIANTS: dict[str, tuple[Mesh | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "packed": (None, PACKED),
    "dynamic": (None, {**PADDED, "dynamic_batching": {**PADDED["dynamic_batching"], "sequence_length_round": 4}}),
    "2 ranks": (Mesh(2), {}),
    "2 ranks, packed": (Mesh(2), PACKED),
    "tp 2": (Mesh(1, 2), {}),
    "cp 2 dp 2": (Mesh(2, context_parallel_size=2), {}),
    "megatron dp 2, packed": (Mesh(2, backend="megatron"), PACKED),
}
SECTION = DPOConfig(reference_policy_kl_penalty=0.3, sft_loss_weight=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("models"))


def pairs() -> TrainingBatch:
    """Five pairs with answers of many lengths, and reference log-probs that differ from the model's."""
    draws = np.random.default_rng(0)

    def side(length: int) -> SupervisedSample:
        return SupervisedSample(draws.integers(3, VOCABULARY, length).astype(np.int32), np.arange(length) >= 3)

    lengths = ((9, 5), (4, 12), (7, 12), (6, 10), (5, 5))
    batch = make_pair_batch([PairSample(side(one), side(other)) for one, other in lengths])
    noise = torch.from_numpy(draws.normal(-4.0, 0.5, batch[keys.TOKEN_IDS].shape)).float()
    batch[keys.REFERENCE_LOGPROBS] = noise * batch[keys.TOKEN_MASK]
    return batch


def huggingface(path: Path, batch: TrainingBatch) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Return the log-probs of the answers' tokens, the loss of the paper, row by row, and its gradients."""
    model = plain_model(path)
    ids, mask = batch["token_ids"], batch["token_mask"]
    rows = []
    for row, length in zip(ids, batch["lengths"].tolist(), strict=True):
        scores = model(input_ids=row[None, :length]).logits[0, :-1].log_softmax(-1)
        own = scores.gather(-1, row[1:length, None])[:, 0]
        rows.append(functional.pad(own, (1, ids.shape[1] - length)))
    logprobs = torch.stack(rows) * mask
    answers = logprobs.sum(-1)
    ratios = answers - batch["reference_logprobs"].sum(-1)
    losses = -functional.logsigmoid(0.3 * (ratios[::2] - ratios[1::2])) - 0.2 * answers[::2]
    losses.mean().backward()
    return (
        logprobs.detach(),
        losses.mean().item(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_loss_and_gradient_are_those_of_huggingface(variant: str, model: Path, pool: RankPool) -> None:
    mesh, settings = VARIANTS[variant]
    batch = pairs()
    calls = [
        ("logprobs", batch),
        ("reference_logprobs", batch),
        ("run_with_weights", clones),
        ("train_step", batch, PreferenceLoss(SECTION)),
        ("run_with_weights", clones),
    ]
    config = {"num_samples": 6, "needs_reference": True, "optimizer": SGD, "train_micro_batch_size": 2}
    config |= settings | (mesh.config if mesh else {})
    arguments: dict[str, Any] = {"path": model, "calls": calls, "config": config}
    played = play(SINGLE_RANK, **arguments) if mesh is None else pool.run(mesh, play, **arguments)[0]
    logprobs, reference, before, metrics, after = played
    expected, loss, gradients = huggingface(model, batch)
    torch.testing.assert_close(logprobs * batch["token_mask"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference, logprobs)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["num_valid_samples"] == 5
    assert metrics["global_valid_seqs"] == 10
    assert metrics["loss"] == pytest.approx(metrics["preference_loss"] + 0.2 * metrics["sft_loss"], abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-4, atol=1e-5)
