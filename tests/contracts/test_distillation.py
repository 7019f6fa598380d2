"""Distillation on every layout of ranks: a teacher's log-probs, loss and gradients, against whole logits."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from nemo_rl import batch as keys
from nemo_rl.algorithms.distillation_loss import DistillationLoss
from nemo_rl.config.loss import DistillationLoss as LossConfig
from nemo_rl.config.teacher import Teacher
from nemo_rl.interfaces import TopK
from nemo_rl.policy.ranks import ALONE, RankLayout
from nemo_rl.policy.teacher import RankTeacher
from tests.contracts.policies import SGD, clones, play
from tests.contracts.rank_pool import Mesh, RankPool
from tests.unit.policy.tiny import VOCABULARY, make_batch, saved_model

LENGTHS = [9, 5, 12, 3, 7, 12, 2]
K, TEMPERATURE = 6, 0.7
LAYOUTS = {"alone": None, "2 ranks": Mesh(2), "4 ranks": Mesh(4), "tp 2": Mesh(1, 2), "2 x tp 2": Mesh(2, 2)}
LOSSES: dict[str, dict[str, Any]] = {
    "mixed": {"mixed_kl_weight": 0.3},
    "reverse, zero outside": {"kl_type": "reverse", "zero_outside_topk": True},
}


def ask(layout: RankLayout, *, path: Path, batch: TensorDict, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What each call of a teacher returns, on one rank."""
    section = Teacher.model_validate(
        {"model_name": str(path), "precision": "float32", "device": "cpu", "logprob_batch_size": 2}
    )
    arguments: dict[str, Any] = {"section": "teacher", "model_path": str(path), "temperature": TEMPERATURE}
    teacher = RankTeacher(section, layout=layout, **arguments)
    assert not any(parameter.requires_grad for parameter in teacher.module.parameters())
    return [getattr(teacher, name)(batch, *more) for name, *more in calls]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("qwen2", tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on(layout: str, pool: RankPool, job: Any, **arguments: Any) -> list[Any]:
    mesh = LAYOUTS[layout]
    return job(ALONE, **arguments) if mesh is None else pool.run(mesh, job, **arguments)[0]


def whole_logprobs(path: Path, batch: TensorDict, model: Any = None) -> torch.Tensor:
    """Of plain Hugging Face in float32, before each token: [B, T, V]."""
    model = model or AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits = model(input_ids=batch["token_ids"], use_cache=False).logits / TEMPERATURE
    return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1).log_softmax(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_says_what_plain_hugging_face_says(layout: str, pool: RankPool, teacher: Path) -> None:
    batch = make_batch(LENGTHS)
    logprobs, topk = on(layout, pool, ask, path=teacher, batch=batch, calls=[("logprobs",), ("topk_logprobs", K)])
    assert isinstance(topk, TopK)
    with torch.no_grad():
        everything = whole_logprobs(teacher, batch)
    asked = batch["token_mask"] > 0
    expected = everything.gather(-1, batch["token_ids"][..., None]).squeeze(-1)
    torch.testing.assert_close(logprobs, torch.where(asked, expected, 0.0), rtol=0, atol=1e-5)
    values, ids = everything.topk(K, dim=-1)
    torch.testing.assert_close(topk.logprobs[asked], values[asked], rtol=0, atol=1e-5)
    assert torch.equal(topk.ids[asked], ids[asked])


@pytest.mark.parametrize("k", [K, VOCABULARY])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_whole_distributions(
    layout: str, loss: str, k: int, pool: RankPool, student: Path, teacher: Path
) -> None:
    batch = make_batch(LENGTHS)
    with torch.no_grad():
        everything = whole_logprobs(teacher, batch)
    logprobs, ids = everything.topk(k, dim=-1)
    batch[keys.TEACHER_TOPK_IDS], batch[keys.TEACHER_TOPK_LOGPROBS] = ids, logprobs
    options = {"kl_type": "mixed", **LOSSES[loss]}
    loss_fn = DistillationLoss(LossConfig.model_validate(options), is_on_policy=False)
    config = {"optimizer": SGD, "temperature": TEMPERATURE, "train_micro_batch_size": 2}
    calls = [("with_weights", clones), ("train_step", batch, loss_fn), ("with_weights", clones)]
    before, metrics, after = on(layout, pool, play, path=student, calls=calls, config=config)

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval()
    expected = whole_loss(everything, whole_logprobs(student, batch, model), ids, options, batch)
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
