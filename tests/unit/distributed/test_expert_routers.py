"""What is said of each kind of router, against the router itself in transformers."""

import pytest
import torch

from nemo_rl.distributed.expert_routers import affinities, find_routers, kind_of, probabilities
from tests.unit.policy.tiny import EXPERT_MODELS, STACKED_MODELS

MODELS = EXPERT_MODELS | STACKED_MODELS


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_the_live_choices_are_the_routers_own(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().float()
    routers = find_routers(model)
    assert len(routers) == (1 if name == "deepseek_v3" else 2)
    for router in routers:
        logits, scores, ids = router(torch.randn(20, 32))
        assert kind_of(router).model_type == model.config.model_type
        torch.testing.assert_close(kind_of(router).scores(router, logits, ids), scores)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_probabilities_are_shares_of_the_affinities(is_sigmoid: bool) -> None:
    """Two experts, logits 0 and log 3: affinities 1/4, 3/4 of a softmax, and sigmoids 1/2, 3/4."""
    logits = torch.tensor([[0.0, 3.0]]).clamp(max=torch.tensor(3.0).log().item())
    expected = [0.5, 0.75] if is_sigmoid else [0.25, 0.75]
    assert affinities(logits, is_sigmoid=is_sigmoid)[0].tolist() == pytest.approx(expected)
    shares = [x / sum(expected) for x in expected]
    assert probabilities(logits, is_sigmoid=is_sigmoid)[0].tolist() == pytest.approx(shares)
