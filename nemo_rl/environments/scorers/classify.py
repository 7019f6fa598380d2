"""The scorer `classify`: a served reward model, by the classify, pooling or embeddings API of vLLM or SGLang."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import EndpointScorerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.scorers.registry import ScoreError, score_each
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure

# By `api`: the path, the key of the tokens in the request, and where the answer has its numbers.
APIS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "vllm_classify": ("/classify", "input", lambda answer: answer["data"][0]["probs"]),
    "vllm_pooling": ("/pooling", "input", lambda answer: answer["data"][0]["data"]),
    "sglang_classify": ("/classify", "input_ids", lambda answer: _unwrap_single(answer)["embedding"]),
    "embeddings": ("/v1/embeddings", "input", lambda answer: answer["data"][0]["embedding"]),
}


class ClassifyScorerConfig(EndpointScorerConfig):
    """A served reward model: `POST /classify` or `/pooling` of vLLM, `/classify` of SGLang, `/v1/embeddings`."""

    api: Literal["vllm_classify", "vllm_pooling", "sglang_classify", "embeddings"] = "vllm_classify"
    tokenizer_name: str | None = None  # renders the conversation; None: `model`
    chat_template: str | None = None
    label: int = Field(default=0, ge=0)  # the label whose score counts, if the model has several


class ClassifyScorer:
    """A served classifier, which is sent tokens so that it adds no second BOS; the score is that of `label`."""

    def __init__(self, name: str, section: ClassifyScorerConfig) -> None:
        from nemo_rl.distributed.endpoint import Endpoint  # loads aiohttp
        from nemo_rl.environments.scorers.classifier import ConversationTokenizer  # loads torch

        self._section = section
        self._endpoint = Endpoint(f"scorers.{name}", section)
        self._tokenizer = ConversationTokenizer.load(
            f"scorers.{name}", section.tokenizer_name or section.model, chat_template=section.chat_template
        )

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await score_each(requests, self._score)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, request: ScoreRequest) -> float:
        path, tokens_key, extract_numbers = APIS[self._section.api]
        token_ids = self._tokenizer.encode(request.messages)
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
