"""Losses and estimators of a user's own, by dotted path."""

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.config.entry_checks import check_distillation, check_grpo
from nemo_rl.config.loading import load_config
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig
from nemo_rl.config.registries import LOSSES
from nemo_rl.errors import ConfigError
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.make import make_loss
from tests.unit.algorithms.batches import normalizer_of
from tests.unit.algorithms.run_setup import make_config
from tests.unit.losses.evaluation import CURRENT, three_tokens

OWN_LOSS = """
from nemo_rl import batch as keys
from nemo_rl.config.kinds import Entry
from nemo_rl.config.loss import LossConfig
from nemo_rl.interfaces import RequiredScores


class Likelihood:
    def __init__(self, weight=1.0, reference=False):
        self.weight = weight
        self.required_keys = frozenset({keys.TOKEN_MASK} | ({keys.REFERENCE_LOGPROBS} if reference else set()))
        self.required_scores = RequiredScores()

    def __call__(self, scores, batch, normalizer):
        loss = -(scores.logprobs * batch[keys.TOKEN_MASK]).sum() / normalizer.num_valid_tokens
        return self.weight * loss, {}


class LikelihoodConfig(LossConfig):
    weight: float = 3.0


def check(key, section, config):
    assert section.weight > 0


ENTRY = Entry(LikelihoodConfig, make=lambda section, context: Likelihood(section.weight), check=check)
number = 3


def nothing():
    return number
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)


def own(**keys_of_section: object) -> GRPORunConfig:
    config = make_config(loss_fn=keys_of_section)
    check_grpo(config)
    return config


def loss_of(config: GRPORunConfig) -> float:
    batch = three_tokens()
    loss, _ = make_loss(config.loss_fn)(TokenScores(torch.tensor([CURRENT])), batch, normalizer_of(batch))
    return float(loss)


def test_a_class_of_ones_own_is_made_of_its_kwargs() -> None:
    plain = -sum(CURRENT) / 3
    assert loss_of(own(type="own_losses:Likelihood")) == pytest.approx(plain)
    assert loss_of(own(type="own_losses.Likelihood", kwargs={"weight": 2.0})) == pytest.approx(2 * plain)


def test_an_entry_of_ones_own_has_its_own_keys_and_check() -> None:
    assert loss_of(own(type="own_losses:ENTRY")) == pytest.approx(-sum(CURRENT))
    assert loss_of(own(type="own_losses:ENTRY", weight=1.0)) == pytest.approx(-sum(CURRENT) / 3)
    with pytest.raises(AssertionError):
        own(type="own_losses:ENTRY", weight=-1.0)


def test_a_loss_that_reads_the_reference_has_one_loaded() -> None:
    assert not own(type="own_losses:Likelihood").needs_reference
    assert own(type="own_losses:Likelihood", kwargs={"reference": True}).needs_reference


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ({"type": "own_losses:Likelihood", "kwargs": {"wait": 1}}, "loss_fn.kwargs", "unexpected keyword .*'wait'"),
        ({"type": "own_losses:nothing"}, "loss_fn.type", r"required_keys, required_scores and __call__"),
        ({"type": "own_losses:number"}, ".type", "must name a class"),
        ({"type": "own_losses:Likelyhood"}, ".type", r"did you mean Likelihood\?"),
        ({"type": "cispoo"}, ".type", r"unknown loss, .*did you mean cispo\?"),
        ({"type": "distillation"}, "loss_fn.type", r"examples/run_distillation\.py only"),
    ],
)
def test_what_makes_no_loss_is_refused(section: dict[str, object], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        own(**section)
    assert error.value.key.endswith(key)


def test_a_policy_gradient_loss_is_refused_where_nothing_computes_advantages() -> None:
    data = make_config().model_dump(exclude={"grpo", "loss_fn", "policies", "reward_penalties"})
    config = DistillationRunConfig.model_validate({**data, "loss_fn": {"type": "ppo"}})
    with pytest.raises(ConfigError, match=r"loss_fn\.type = 'ppo': .*examples/run_grpo\.py only"):
        check_distillation(config)


def test_reinforce_reads_previous_logprobs_for_its_importance_weights_only() -> None:
    section = LOSSES.read({"type": "reinforce"})
    assert keys.PREV_LOGPROBS not in make_loss(section).required_keys
    assert not section.uses_prev_logprobs


def test_a_recipe_names_a_loss_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        dedent(
            """
            grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}
            policy: {model_name: m, train_global_batch_size: 8, train_micro_batch_size: 4}
            data: {train: {dataset_name: gsm8k}}
            env: {math: {}}
            loss_fn: {type: "own_losses:Likelihood", kwargs: {weight: 2.0}}
            """
        )
    )
    assert loss_of(load_config(path)) == pytest.approx(-2 * sum(CURRENT) / 3)
    with pytest.raises(ConfigError, match=r"loss_fn\.ratio_clip_min = 0.1: unknown key"):
        load_config(path, ["loss_fn.ratio_clip_min=0.1"])
