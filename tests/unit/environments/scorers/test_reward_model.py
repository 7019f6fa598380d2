import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.environments.scorers.classifier import ConversationTokenizer, ConversationTooLong
from nemo_rl.environments.scorers.reward_model import ClassifyScorer, ClassifyScorerConfig, RenderingConfig
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, Message
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.scoring_server import scoring_server

TALK = (Message("user", "ab"), Message("assistant", "c"))
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


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

    async def main() -> list[float | Failure]:
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

    async def main() -> list[float | Failure]:
        async with scoring_server(answers) as url:
            limits = EndpointLimitsConfig(max_retries=0)
            scorer = ClassifyScorer("rm", ClassifyScorerConfig(base_urls=[url], model=str(tmp_path), limits=limits))
            scores = await scorer.score([ScoreRequest(TALK, {})])
            await scorer.close()
        return scores

    (score,) = asyncio.run(main())
    assert isinstance(score, Failure)
    assert "no score number 0" in score.cause


def test_the_bos_that_a_template_writes_is_the_only_one() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = WITH_BOS
    token_ids = ConversationTokenizer(tokenizer).encode(TALK)
    (bos_token_id,) = tokenizer.encode("<|im_start|>")
    assert token_ids.count(bos_token_id) == 1
    assert token_ids == [bos_token_id, *tokenizer.encode("abc")]


def test_a_conversation_that_does_not_fit_is_said_to() -> None:
    tokens = ConversationTokenizer(chat_tokenizer(), max_length=10)
    with pytest.raises(ConversationTooLong, match="where 10 fit"):
        tokens.encode(TALK)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"scorers\.rm\.chat_template = None: the tokenizer of .* has none"):
        ConversationTokenizer.load("scorers.rm", RenderingConfig(), str(tmp_path))


def test_variables_of_the_template_reach_it(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    section = RenderingConfig(chat_template="{{ mode }}", chat_template_kwargs={"mode": "abc"})
    tokens = ConversationTokenizer.load("scorers.rm", section, str(tmp_path))
    assert tokens.encode(TALK) == chat_tokenizer().encode("abc")
