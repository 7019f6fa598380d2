"""The extension kit refuses parts that break their contract, with the claim that is broken.

Built-in losses, estimators, environments and engines are checked where their other tests are.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import ENVIRONMENTS, LOSSES
from nemo_rl.loss_types import Metric, RequiredScores
from nemo_rl.testing import check_engine, check_environment, check_estimator, check_loss
from nemo_rl.types import Completion, EnvStep, GenerationRequest, Message


class Likelihood:
    """-lp of each trained token."""

    required_keys = frozenset({keys.TOKEN_MASK, keys.SAMPLE_MASK})
    required_scores = RequiredScores(entropy=True)

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def __call__(self, scores: Any, batch: Any, normalizer: Any) -> Any:
        mask = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None]
        if self._fault != "first":
            mask = mask.index_fill(1, torch.tensor([0]), 0.0)
        count = mask.sum().clamp(min=1) if self._fault == "own count" else max(normalizer.num_valid_tokens, 1.0)
        if self._fault == "no mask":
            mask = torch.ones_like(mask)
        if self._fault == "undeclared":
            batch[keys.PREV_LOGPROBS]
        loss = -(scores.logprobs * mask).sum() / count + 0.1 * (scores.entropy * mask).sum() / count
        metric = loss if self._fault == "metric" else loss.detach()
        return (loss.detach() if self._fault == "detached" else loss), {"nll": Metric(metric)}


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("first", "entry 0 of a sample has a gradient"),
        ("own count", r"do not add up .* loss"),
        ("no mask", "where token_mask . sample_mask is 0 change the loss"),
        ("undeclared", "prev_logprobs.* which required_keys does not name"),
        ("metric", "'nll' has a gradient"),
        ("detached", "the loss has no gradient"),
    ],
)
def test_loss_with_a_fault_is_refused(fault: str, claim: str) -> None:
    with pytest.raises(AssertionError, match=claim):
        check_loss(Likelihood, kwargs={"fault": fault})


def test_loss_may_be_a_class_an_object_or_a_path() -> None:
    for target in (Likelihood, Likelihood(), f"{__name__}:Likelihood"):
        check_loss(target)
    assert "checked" not in LOSSES.names


class Rewards:
    """A = r, or something else if a fault is named."""

    required_keys = frozenset({keys.REWARD, keys.TOKEN_MASK})

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def __call__(self, batch: Any) -> torch.Tensor:
        rewards = batch[keys.REWARD][:, None].expand_as(batch[keys.TOKEN_MASK]).clone()
        if self._fault == "changes":
            batch[keys.REWARD] += 1
        if self._fault == "order":
            rewards[0] += 1
        return {"shape": rewards[:, 0], "dtype": rewards.double(), "nan": rewards / 0 * 0}.get(self._fault, rewards)


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("changes", "changes the batch"),
        ("order", "with the order of samples"),
        ("shape", r"not \[B, T\]"),
        ("dtype", "not float32"),
        ("nan", "not finite"),
    ],
)
def test_estimator_with_a_fault_is_refused(fault: str, claim: str) -> None:
    check_estimator(Rewards)
    with pytest.raises(AssertionError, match=claim):
        check_estimator(Rewards, kwargs={"fault": fault})


class Spelling:
    """Reward 1 for the answer of the state."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        if self._fault == "changes":
            for state in states:
                state["seen"] = True  # type: ignore[index]
        right = [c[-1].content == state["answer"] for c, state in zip(conversations, states, strict=True)]
        steps = [EnvStep(rewards={"right": float(each)}, done=self._fault != "goes on") for each in right]
        return {"reversed": sorted(steps, key=str), "lost": steps[1:]}.get(self._fault, steps)

    async def close(self) -> None:
        pass


class MarkedConfig(EnvironmentConfig):
    fault: str = ""


MARKED = Entry(MarkedConfig, make=lambda name, section: Spelling(section.fault))


@pytest.mark.parametrize("target", [Spelling, MARKED, lambda messages, metadata: 1.0 if messages[-1]["content"] else 0])
def test_environment_may_be_a_class_an_entry_or_a_function(target: Any) -> None:
    check_environment(target, state={"answer": "cba"}, final="cba")
    assert "checked" not in ENVIRONMENTS.names


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("changes", "caller's state was changed"),
        ("goes on", "does not end the conversation"),
        ("reversed", "in another order"),
        ("lost", "2 results for 3 items|0 results for 1 items"),
    ],
)
def test_environment_with_a_fault_is_refused(fault: str, claim: str) -> None:
    with pytest.raises(AssertionError, match=claim):
        check_environment(MARKED, state={"answer": "cba"}, final="cba", fault=fault)


class Cyclic:
    """A model whose next token is the last one + 1, nearly always, and an engine of it."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        self._calls = 0

    def __call__(self, ids: torch.Tensor) -> Any:
        logits = torch.nn.functional.one_hot((ids + 1) % 128, 128).float() * 4
        return type("Output", (), {"logits": logits})

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests[1:] if self._fault == "lost" else requests:
            self._calls += 1
            yield self._sample(request)

    def _sample(self, request: GenerationRequest) -> Completion:
        sampling, ids, logprobs = request.sampling, list(request.token_ids), []
        seed = self._calls if self._fault == "seed" else request.seed % 2**63
        generator = torch.Generator().manual_seed(seed)
        stop = () if self._fault == "stop" else sampling.stop_token_ids
        while len(logprobs) < sampling.max_new_tokens and not (logprobs and ids[-1] in stop):
            logits = self(torch.tensor([ids])).logits[0, -1]
            temperature = 1.0 if self._fault == "temperature" else sampling.temperature or 1.0
            distribution = (logits / temperature).log_softmax(-1)
            is_greedy = sampling.temperature == 0 and self._fault != "greedy"
            drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
            ids.append(int(logits.argmax() if is_greedy else drawn))
            logprobs.append(float(distribution[ids[-1]]))
        reason = "stop" if ids[-1] in stop else "length"
        return Completion(request.request_id, tuple(ids[-len(logprobs) :]), tuple(logprobs), reason, (0, 0))


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("lost", "one per request"),
        ("temperature", r"log-probs differ from the model's .* at temperature 0\.7"),
        ("greedy", "temperature 0 takes token"),
        ("seed", "the seed must decide it"),
        ("stop", "with stop token"),
    ],
)
def test_engine_with_a_fault_is_refused(fault: str, claim: str) -> None:
    make = cast(Any, Cyclic)  # it has only the methods that the check calls
    asyncio.run(check_engine(make(), make()))
    with pytest.raises(AssertionError, match=claim):
        asyncio.run(check_engine(make(fault), make()))


def test_import_loads_no_torch() -> None:
    code = "import sys, nemo_rl.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
