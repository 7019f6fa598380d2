"""Scorer `classify`: a served reward model, by the classify, pooling or embeddings API of vLLM or SGLang."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import EndpointScorerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.scorers.checked_scorer import ScoreError, score_each
from nemo_rl.environments.scorers.reward_model import RenderingConfig
from nemo_rl.types import Failure, ResponseFault, ScoreRequest

# By `api`: the path, the key of the tokens in the request, and how to find the numbers in the answer.
APIS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "vllm_classify": ("/classify", "input", lambda answer: answer["data"][0]["probs"]),
    "vllm_pooling": ("/pooling", "input", lambda answer: answer["data"][0]["data"]),
    "sglang_classify": ("/classify", "input_ids", lambda answer: _unwrap_single(answer)["embedding"]),
    "embeddings": ("/v1/embeddings", "input", lambda answer: answer["data"][0]["embedding"]),
}


class ClassifyScorerConfig(RenderingConfig, EndpointScorerConfig):
    """A served reward model: `POST /classify` or `/pooling` of vLLM, `/classify` of SGLang, `/v1/embeddings`."""

    # the server's kind and endpoint
    api: Literal["vllm_classify", "vllm_pooling", "sglang_classify", "embeddings"] = "vllm_classify"
    label: int = Field(default=0, ge=0)  # the label whose score counts, if the model has several


class ClassifyScorer:
    """A served classifier, which is sent tokens so that it adds no second BOS; the score is that of `label`."""

    def __init__(self, name: str, section: ClassifyScorerConfig) -> None:
        from nemo_rl.distributed.endpoint import Endpoint  # loads aiohttp
        from nemo_rl.environments.scorers.conversation_tokenizer import ConversationTokenizer  # loads torch

        self._section = section
        self._endpoint = Endpoint(f"scorers.{name}", section)
        self._tokenizer = ConversationTokenizer.load(f"scorers.{name}", section, section.model)
        # A long response takes a second; a tokenizer is used by one thread at a time.
        self._tokenizing = BlockingCalls(f"scorers-{name}", max_concurrency=1)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure | ResponseFault]:
        return await score_each(requests, self._score)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, request: ScoreRequest) -> float | ResponseFault:
        path, tokens_key, extract_numbers = APIS[self._section.api]
        token_ids = await self._tokenizing.run(partial(self._tokenizer.encode_response, request.messages))
        if isinstance(token_ids, ResponseFault):
            return token_ids
        body = {"model": self._section.model, tokens_key: token_ids}
        answer = await self._endpoint.post(path, body, num_tokens=len(token_ids))
        try:
            numbers = extract_numbers(answer)
            return float(numbers[self._section.label] if isinstance(numbers, list) else numbers)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ScoreError(f"{path}: no score number {self._section.label} in {str(answer)[:200]}") from error


CLASSIFY = Entry(ClassifyScorerConfig, make=ClassifyScorer)


def _unwrap_single(answer: Any) -> Any:
    """Return SGLang's answer to one request, which is an object or a list of one."""
    return answer[0] if isinstance(answer, list) else answer
