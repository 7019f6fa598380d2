from typing import Any

import pytest
import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.optimizers import check_optimizer, make_optimizer
from tests.unit.policy.tiny import learning_rates

LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}}


def config(**sections: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model_name": "unused", **sections})


def test_lists_become_tuples_and_adam_is_fused() -> None:
    optimizer = make_optimizer(config(), [torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["fused"] is True


def test_user_chooses_the_kernel() -> None:
    section = config(optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "foreach": False, "fused": False}})
    assert make_optimizer(section, [torch.nn.Parameter(torch.ones(2))]).defaults["fused"] is False


def test_default_learning_rate_stays() -> None:
    assert learning_rates(config(), 3) == [5e-6] * 3


def test_stages_follow_each_other_at_the_milestones() -> None:
    section = config(
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
        scheduler=[LINEAR, CONSTANT, {"milestones": [3]}],
    )
    assert learning_rates(section, 6) == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.0, 1.0])


def test_single_scheduler_needs_no_list() -> None:
    section = config(optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}, scheduler=LINEAR)
    assert learning_rates(section, 5) == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.0])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"kwargs": {"lrr": 1e-3}}}, r"policy\.optimizer\.kwargs\.lrr .*did you mean .*kwargs\.lr\?"),
        (
            {"optimizer": {"name": "torch.optim.LBFGS", "kwargs": {}, "decay_norm_and_bias": False}},
            r"policy\.optimizer\.decay_norm_and_bias = False: LBFGS has no weight_decay",
        ),
        ({"optimizer": {"kwargs": {"lr": -1}}}, r"policy\.optimizer\.kwargs .*Invalid learning rate"),
        ({"optimizer": {"name": "torch.optim.adamw"}}, r"policy\.optimizer\.name .*"),
        ({"optimizer": {"name": "torch.optim.Adamw"}}, r"policy\.optimizer\.name .*did you mean torch\.optim\.AdamW"),
        ({"optimizer": {"name": "AdamW"}}, r"policy\.optimizer\.name .*module"),
        ({"optimizer": {"name": "nowhere.AdamW"}}, r"policy\.optimizer\.name .*nowhere"),
        ({"scheduler": {"kwargs": {}}}, r"policy\.scheduler\.name .*dotted path"),
        ({"scheduler": [LINEAR, {"name": "torch.optim.AdamW"}]}, r"policy\.scheduler\.1\.name .*no LRScheduler"),
        ({"scheduler": [LINEAR, CONSTANT]}, r"policy\.scheduler .*milestones"),
        ({"scheduler": [LINEAR, CONSTANT, {"milestones": [3, 6]}]}, r"policy\.scheduler\.2\.milestones .*1 milestones"),
        (
            {"scheduler": [LINEAR, CONSTANT, CONSTANT, {"milestones": [6, 3]}]},
            r"policy\.scheduler\.3\.milestones .*rise",
        ),
        ({"scheduler": {"milestones": [3]}}, r"policy\.scheduler\.milestones .*list"),
        ({"scheduler": {**LINEAR, "kwargs": {"steps": 3}}}, r"policy\.scheduler\.kwargs\.steps .*unknown key"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.StepLR"}}, r"policy\.scheduler\.kwargs .*step_size"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}, r"policy\.scheduler\.name .*metric"),
    ],
)
def test_what_is_wrong_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer(config(**sections))


def test_what_is_right_passes() -> None:
    check_optimizer(config(scheduler=[LINEAR, CONSTANT, {"milestones": [3]}]))
