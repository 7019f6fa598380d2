"""Training on samples that share prefixes, against the same samples computed whole: every loss, on layouts of ranks.

A step of SGD with a learning rate of 1 moves every weight by its gradient.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.registries import LOSSES
from nemo_rl.interfaces import LossFn
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import TopKDivergence
from nemo_rl.losses.likelihood import NegativeLogLikelihood
from nemo_rl.losses.make import make_loss
from nemo_rl.policy.prefix_tree import PrefixTree
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from tests.contracts.layouts import MULTIPLE, plain_model
from tests.contracts.policies import SGD, clones, make_policy, play
from tests.contracts.rank_pool import RankPool
from tests.contracts.test_distillation import ask
from tests.support.quick import quick
from tests.unit.losses.evaluation import EVERY_OPTION
from tests.unit.policy.tiny import make_sharing_batch, plain_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [9, 5, 12, 12, 7, 12, 3, 7, 6, 11, 12, 8]
NUM_SAMPLES = len(LENGTHS)
MODELS = {"plain": "qwen2", "2 ranks": "llama", "tp 2": "qwen3", "2 x tp 2": "qwen2"}
PACKS = ("one pack", "several packs")
CASES = list(product(MODELS, PACKS))
WHOLE: dict[str, Any] = {"train_micro_batch_size": NUM_SAMPLES}  # one micro-batch of padded samples
SHARING: dict[str, Any] = {
    "sequence_packing": {"enabled": True, "share_prefixes": True, "train_mb_tokens": 200, "logprob_mb_tokens": 24}
}
SEVERAL_PACKS: dict[str, Any] = {
    "sequence_packing": {"enabled": True, "share_prefixes": True, "train_mb_tokens": 24, "logprob_mb_tokens": 16}
}
# Of a micro-batch as a whole, hence of one pack on one data-parallel rank; all that may be chosen, so none at random.
OF_A_MICRO_BATCH: dict[str, dict[str, Any]] = {
    "clip_cov": {"type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.0},
    "kl_cov": {"type": "kl_cov", "kl_cov_ratio": 0.3},
}
DISTILLATION: dict[str, dict[str, Any]] = {
    "mixed": {"kl_type": "mixed", "mixed_kl_weight": 0.3},
    "reverse, zero outside": {"kl_type": "reverse", "zero_outside_topk": True},
}


def sharing_batch(model: Path, lengths: list[int] = LENGTHS) -> TensorDict:
    """Return 12 samples of 9 trajectories in 3 groups, with everything that a loss reads."""
    batch = make_sharing_batch(lengths)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        current = plain_logprobs(plain_model(model), batch, temperature=0.7)
    for name in (keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS, keys.GENERATION_LOGPROBS):
        batch[name] = current + torch.randn(current.shape, generator=generator) * 0.3
    batch[keys.TRAJECTORY_ID] = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8])
    tokens = torch.zeros(9).index_add_(0, batch[keys.TRAJECTORY_ID], batch[keys.TOKEN_MASK].sum(-1))
    batch[keys.TRAJECTORY_TOKENS] = tokens[batch[keys.TRAJECTORY_ID]]
    batch[keys.REWARD] = (torch.arange(NUM_SAMPLES) % 3).float()
    batch[keys.SAMPLE_MASK][4] = 0.0
    k_shape = (*current.shape, 6)
    batch[keys.TEACHER_TOPK_IDS] = torch.randint(3, 37, k_shape, generator=generator)
    batch[keys.TEACHER_TOPK_LOGPROBS] = torch.randn(k_shape, generator=generator).log_softmax(-1) - 0.1
    return batch


def made(name: str) -> LossFn:
    if name == "sft":
        return NegativeLogLikelihood()
    if name in DISTILLATION:
        return TopKDivergence(DistillationLossConfig.model_validate(DISTILLATION[name]), is_on_policy=False)
    return make_loss(LOSSES.read({**EVERY_OPTION, **OF_A_MICRO_BATCH}[name]))


def learn(
    layout: RankLayout, *, path: Path, batch: TensorDict, losses: Sequence[str], config: dict[str, Any]
) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Return the metrics of one step with each loss, and the weights after it, on one rank."""
    policy = make_policy(layout, path, num_samples=NUM_SAMPLES, optimizer=SGD, temperature=0.7, **config)
    first = [parameter.detach().clone() for parameter in policy.module.parameters()]
    results = []
    for name in losses:
        metrics = policy.train_step(batch, made(name))
        results.append((metrics, policy.run_with_weights(clones)))
        with torch.no_grad():
            for parameter, value in zip(policy.module.parameters(), first, strict=True):
                parameter.copy_(value)
    policy.close()
    return results


def on(layout: str, pool: RankPool, job: Any, **arguments: Any) -> Any:
    return job(SINGLE_RANK, **arguments) if layout == "plain" else pool.run(MULTIPLE[layout], job, **arguments)[0]


def assert_same_steps(
    losses: Sequence[str], results: Sequence[Any], expected: Sequence[Any], before: dict[str, torch.Tensor]
) -> None:
    for loss, (metrics, weights), (want, expected_weights) in zip(losses, results, expected, strict=True):
        assert metrics.keys() == want.keys()
        bound = 4e-5 if loss.startswith("vespo") else 1e-5  # its weight multiplies the rounding of all of a sequence
        for name, value in metrics.items():
            assert value == pytest.approx(want[name], rel=bound, abs=bound), (loss, name)
        moved = max(float((weight.detach() - before[name].detach()).abs().max()) for name, weight in weights.items())
        for name, weight in weights.items():  # float32 rounds a gradient relative to its largest elements, up to 11
            torch.testing.assert_close(weight, expected_weights[name], rtol=bound, atol=bound * max(1.0, moved))
        assert moved > 1e-3


def test_batch_shares_more_than_its_prompts(models: dict[str, Path]) -> None:
    batch = sharing_batch(models["qwen2"])
    tree = PrefixTree.of(batch["token_ids"].numpy(), LENGTHS)
    counts = torch.zeros(tree.num_tokens)
    for positions, length, mask in zip(tree.positions, LENGTHS, batch["token_mask"], strict=True):
        counts[torch.from_numpy(positions[:length])] += mask[:length]
    assert tree.num_tokens < sum(LENGTHS) / 1.4
    assert (counts > 1).sum() >= 5  # sampled tokens of several samples


@pytest.mark.parametrize(("layout", "packs"), quick(CASES, [*product(["plain"], PACKS), *CASES[-1:]]))
def test_loss_metrics_and_gradients_are_those_of_whole_samples(
    layout: str, packs: str, models: dict[str, Path], pool: RankPool
) -> None:
    path = models[MODELS[layout]]
    losses = [*EVERY_OPTION, "sft", *DISTILLATION]
    if packs == "one pack" and layout in ("plain", "tp 2"):
        losses += OF_A_MICRO_BATCH
    elif layout == "2 x tp 2" or packs == "several packs":
        losses = losses[::4]
    sharing = SHARING if packs == "one pack" else SEVERAL_PACKS
    arguments: dict[str, Any] = {"path": path, "batch": sharing_batch(path), "losses": losses}
    expected = learn(SINGLE_RANK, **arguments, config=WHOLE)
    config = {**sharing, **({} if layout == "plain" else MULTIPLE[layout].config)}
    results = on(layout, pool, learn, **arguments, config=config)
    assert_same_steps(losses, results, expected, dict(plain_model(path).named_parameters()))


@pytest.mark.parametrize("layout", ["plain", "2 ranks"])
def test_adapters_learn_what_they_learn_from_whole_samples(
    layout: str, models: dict[str, Path], pool: RankPool
) -> None:
    """In two steps: B is 0 before the first, so A has no gradient there."""
    path = models["qwen2"]
    batch = sharing_batch(path)
    reading = [("logprobs", batch), ("reference_logprobs", batch), ("run_with_weights", clones)]
    calls = [*[("train_step", batch, NegativeLogLikelihood())] * 2, *reading]
    adapters = {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}
    said = []
    for where, batching in (("plain", WHOLE), (layout, SEVERAL_PACKS)):
        config: dict[str, Any] = {**batching, "num_samples": NUM_SAMPLES, "needs_reference": True}
        config |= {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.3}}}
        own = {} if where == "plain" else MULTIPLE[where].config
        config |= {**own, "dtensor_cfg": adapters}
        said.append(on(where, pool, play, path=path, calls=calls, config=config))
    _, _, logprobs, reference, _ = said[0]
    assert (logprobs - reference).abs().max() > 1e-2
    for got, want in zip(said[1], said[0], strict=True):
        if isinstance(got, dict) and "loss" in got:
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", quick(MODELS, ["plain", "2 x tp 2"]))
def test_a_teacher_says_the_same(layout: str, models: dict[str, Path], pool: RankPool) -> None:
    path = models["llama"]
    arguments: dict[str, Any] = {
        "path": path,
        "batch": sharing_batch(path),
        "calls": [("logprobs",), ("topk_logprobs", 6)],
    }
    expected, expected_topk = ask(SINGLE_RANK, **arguments, logprob_batch_size=NUM_SAMPLES)
    packing = {"enabled": True, "share_prefixes": True, "logprob_mb_tokens": 24}
    own = {} if layout == "plain" else MULTIPLE[layout].config
    logprobs, topk = on(layout, pool, ask, **arguments, sequence_packing=packing, **own)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(topk.logprobs, expected_topk.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(topk.ids, expected_topk.ids)
