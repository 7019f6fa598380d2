"""A judge behind real vLLM: chat completions over HTTP, and the sampled answer as the score."""

import asyncio
from typing import Any

import pytest

from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.scorers.judge import JudgeScorer, JudgeScorerConfig
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.types import Failure, Message, ResponseFault, SamplingParams, ScoreRequest
from tests.contracts.engines import MAX_MODEL_LEN
from tests.templates import byte_tokenizer

DEADLINE_S = 200.0
answers: list[str] = []


def length_of(text: str) -> float:
    """A random model says no number: its answers are told apart by their length."""
    answers.append(text)
    return float(len(text))


@pytest.fixture
def engine(engines: Any) -> Any:
    return engines("vllm", "tied")


def test_answers_of_a_real_engine_are_scores_each_of_its_own_request(
    engine: Any, engine_loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ScoreRequest((Message("user", f"question {i}"), Message("assistant", f"answer {i}")), {}) for i in range(12)
    ]

    async def main() -> list[float | Failure | ResponseFault]:
        encoder = ChatEncoder(byte_tokenizer("chatml"))
        sampling = SamplingParams(40, temperature=1.0, stop_token_ids=encoder.stop_token_ids)
        rules = CompletionRules("judge", MAX_MODEL_LEN, sampling, seed=1, max_concurrent_calls=16, timeout_s=DEADLINE_S)
        codec = Codec(encoder, tool_parser_name=None)
        manager = await GatewayManager.start(engine, codec, rules, GatewayConfig())
        section = JudgeScorerConfig(
            base_urls=[manager.default_base_url],
            model="judge",
            api_key_env="JUDGE_KEY",
            prompt="Rate the answer {{ response }} to {{ prompt }}.",
            parser=f"{__name__}:length_of",
            limits=EndpointLimitsConfig(max_concurrency=4, max_retries=0, request_timeout_s=DEADLINE_S),
        )
        monkeypatch.setenv("JUDGE_KEY", manager.api_key)
        scorer = JudgeScorer("judge", section)
        try:
            return await scorer.score(requests)
        finally:
            await scorer.close()
            await manager.close()

    answers.clear()
    scores = engine_loop.run(main())
    assert not [score for score in scores if isinstance(score, Failure)]
    assert sorted(scores) == sorted(float(len(text)) for text in answers)  # type: ignore[type-var]
    assert len(answers) == len(requests)
    assert len(set(scores)) > 1  # whoever judges them, they are not all one
