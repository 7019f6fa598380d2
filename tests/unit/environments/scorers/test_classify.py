"""The scorer `classify` against a fake server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.environments.scorers.classify import ClassifyScorer, ClassifyScorerConfig
from nemo_rl.types import Failure, Message, ResponseFault, ScoreRequest
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.scoring_server import scoring_server

TALK = (Message("user", "ab"), Message("assistant", "c"))


@pytest.mark.parametrize(
    ("api", "path", "key", "answer"),
    [
        ("vllm_classify", "/classify", "input", {"data": [{"probs": [0.25, 0.75]}]}),
        ("vllm_pooling", "/pooling", "input", {"data": [{"data": [0.25, 0.75]}]}),
        ("sglang_classify", "/classify", "input_ids", [{"embedding": [0.25, 0.75]}]),
        ("embeddings", "/v1/embeddings", "input", {"data": [{"embedding": [0.25, 0.75]}]}),
    ],
)
def test_each_api_is_asked_with_tokens_and_read_at_its_label(
    tmp_path: Path, api: str, path: str, key: str, answer: Any
) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    asked: dict[str, Any] = {}

    async def answers(at: str, body: dict[str, Any]) -> web.Response:
        asked.update(body, path=at)
        return web.json_response(answer)

    async def main() -> list[float | Failure | ResponseFault]:
        async with scoring_server(answers) as url:
            entry = {"base_urls": [url], "model": str(tmp_path), "api": api, "label": 1}
            scorer = ClassifyScorer("rm", ClassifyScorerConfig.model_validate(entry))
            scores = await scorer.score([ScoreRequest(TALK, {})])
            await scorer.close()
        return scores

    assert asyncio.run(main()) == [0.75]
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
    assert asked == {"path": path, "model": str(tmp_path), key: tokenizer(text)["input_ids"]}


def test_an_answer_of_another_shape_is_a_failure(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)

    async def answers(at: str, body: dict[str, Any]) -> web.Response:
        return web.json_response({"data": []})

    async def main() -> list[float | Failure | ResponseFault]:
        async with scoring_server(answers) as url:
            limits = EndpointLimitsConfig(max_retries=0)
            scorer = ClassifyScorer("rm", ClassifyScorerConfig(base_urls=[url], model=str(tmp_path), limits=limits))
            scores = await scorer.score([ScoreRequest(TALK, {})])
            await scorer.close()
        return scores

    (score,) = asyncio.run(main())
    assert isinstance(score, Failure)
    assert "no score number 0" in score.cause
