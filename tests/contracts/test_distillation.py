"""Distillation on every layout of ranks: a teacher's log-probs, loss and gradients, against whole logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.loss_types import TopK
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import TopKDivergence
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.worker import make_teacher_worker
from tests.contracts.layouts import BATCHING, DENSE, FSDP2, MULTIPLE, UNEVEN, Layouts, plain_model, same
from tests.contracts.policies import SGD, clones
from tests.contracts.rank_pool import RankPool
from tests.support.quick import quick
from tests.unit.policy.tiny import VOCABULARY, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

K, TEMPERATURE = 6, 0.7
TEACHER_BATCHING: dict[str, dict[str, Any]] = {
    "samples": {"logprob_batch_size": 2},
    "packed": {"sequence_packing": {"enabled": True, "logprob_mb_tokens": 16}},
    "padded by tokens": {"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 24}},
}
LOSSES: dict[str, dict[str, Any]] = {
    "mixed": {"mixed_kl_weight": 0.3},
    "reverse, zero outside": {"kl_type": "reverse", "zero_outside_topk": True},  # reads the entropy too
}
LEARNT = [
    *((layout, "samples", loss, k) for layout in ("plain", *FSDP2) for loss in LOSSES for k in (K, VOCABULARY)),
    ("2 x tp 2", "packed", "reverse, zero outside", K),
    ("megatron dp 2", "samples", "mixed", K),
    ("megatron tp 2", "samples", "reverse, zero outside", K),
    ("megatron pp 2", "packed", "mixed", VOCABULARY),
    ("megatron tp 2 pp 2", "samples", "mixed", K),
    ("megatron tp 2 pp 2", "packed", "reverse, zero outside", VOCABULARY),
]


def ask(
    layout: RankLayout, *, path: Path, batch: TensorDict, calls: Sequence[tuple[Any, ...]], **config: Any
) -> list[Any]:
    """Return the result of each call of a teacher, the rows of all ranks together, on one rank."""
    section = TeacherConfig.model_validate({"model_name": str(path), "precision": "float32", "device": "cpu", **config})
    arguments: dict[str, Any] = {"section": "teacher", "model_path": str(path), "temperature": TEMPERATURE}
    teacher = make_teacher_worker(section, layout=layout, **arguments)
    assert not any(parameter.requires_grad for parameter in teacher.module.parameters())
    scored = [layout.all_gather_object(getattr(teacher, name)(batch, *more)) for name, *more in calls]
    merged = [merge_rows(parts, batch) for parts in scored]
    return [values[0] if len(values) == 1 else TopK(*values) for values in merged]


def whole_logprobs(path: Path, batch: TensorDict, model: Any = None) -> torch.Tensor:
    """Return plain Hugging Face log-probs in float32, before each token: [B, T, V]."""
    logits = (model or plain_model(path))(input_ids=batch["token_ids"], use_cache=False).logits / TEMPERATURE
    return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1).log_softmax(-1)


@pytest.mark.parametrize(
    ("layout", "batching"),
    [
        *((layout, "samples") for layout in ("plain", *DENSE)),
        *(("plain", batching) for batching in ("packed", "padded by tokens")),
        ("megatron tp 2 pp 2", "packed"),
    ],
)
def test_a_teacher_says_what_plain_hugging_face_says(
    layout: str, batching: str, pool: RankPool, models: dict[str, Path]
) -> None:
    batch, path = make_batch(UNEVEN), models["llama"]
    calls = [("logprobs",), ("topk_logprobs", K)]
    arguments: dict[str, Any] = {"path": path, "batch": batch, "calls": calls, **TEACHER_BATCHING[batching]}
    if layout == "plain":
        answers = ask(SINGLE_RANK, **arguments)
    else:
        answers, *others = pool.run(MULTIPLE[layout], ask, **arguments, **MULTIPLE[layout].config)
        assert all(same(tuple(answers), tuple(other)) for other in others)
    logprobs, topk = answers
    assert isinstance(topk, TopK)
    with torch.no_grad():
        everything = whole_logprobs(path, batch)
    asked = batch["token_mask"] > 0
    expected = everything.gather(-1, batch["token_ids"][..., None]).squeeze(-1)
    torch.testing.assert_close(logprobs, torch.where(asked, expected, 0.0), rtol=0, atol=1e-5)
    values, ids = everything.topk(K, dim=-1)
    torch.testing.assert_close(topk.logprobs[asked], values[asked], rtol=1e-5, atol=1e-5)
    assert torch.equal(topk.ids[asked], ids[asked])


@pytest.mark.parametrize(
    ("layout", "batching", "loss", "k"), quick(LEARNT, [each for each in LEARNT if each[3] == K or "plain" in each])
)
def test_loss_and_gradients_are_those_of_whole_distributions(
    layout: str, batching: str, loss: str, k: int, run: Layouts, models: dict[str, Path]
) -> None:
    batch = make_batch(UNEVEN)
    with torch.no_grad():
        everything = whole_logprobs(models["llama"], batch)
    logprobs, ids = everything.topk(k, dim=-1)
    batch[keys.TEACHER_TOPK_IDS], batch[keys.TEACHER_TOPK_LOGPROBS] = ids, logprobs
    options = {"kl_type": "mixed", **LOSSES[loss]}
    loss_fn = TopKDivergence(DistillationLossConfig.model_validate(options), is_on_policy=False)
    config: dict[str, Any] = {"optimizer": SGD, "temperature": TEMPERATURE, **BATCHING[batching]}
    calls = [("run_with_weights", clones), ("train_step", batch, loss_fn), ("run_with_weights", clones)]
    before, metrics, after = run(layout, "qwen2", *calls, **config)

    model = plain_model(models["qwen2"])
    expected = whole_loss(everything, whole_logprobs(models["qwen2"], batch, model), ids, options, batch)
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert set(metrics) >= {"forward_kl", "reverse_kl", "teacher_topk_mass", "student_topk_mass"}
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        moved = before[name] - after[name]  # by the gradient, since the learning rate is 1
        torch.testing.assert_close(moved / scale, parameter.grad / scale, rtol=1e-3, atol=1e-4)


def whole_loss(
    log_p: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], batch: TensorDict
) -> torch.Tensor:
    """From [B, T, V], by torch's own divergence."""
    compared = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)
    log_p = log_p.masked_fill(~compared, -torch.inf).log_softmax(-1).masked_fill(~compared, -100.0)
    if not options.get("zero_outside_topk"):
        log_q = log_q.masked_fill(~compared, -1e4).log_softmax(-1)
    forward = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    reverse = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    weight = {"mixed": options.get("mixed_kl_weight", 0.5), "reverse": 0.0}[options["kl_type"]]
    each = weight * forward + (1 - weight) * reverse
    return (each * batch["token_mask"]).sum() / batch["token_mask"].sum()
