"""A served reward model: classify, pooling and embeddings endpoints of vLLM and SGLang."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.scorers import ClassifyScorerConfig
from nemo_rl.data.tokenizer import load_tokenizer_with_template
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.environments.scorers.registry import score_each
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, Message


class ConversationTooLong(Exception):
    """More tokens than the reward model takes."""


class ConversationTokenizer:
    """Renders whole conversations, without a prompt for a further answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._max_length = max_length

    @classmethod
    def load(
        cls, key: str, name: str, *, chat_template: str | None, max_length: int | None = None
    ) -> "ConversationTokenizer":
        """From the Hugging Face name or folder `name`; raises ConfigError below `key` where it cannot be used."""
        tokenizer = load_tokenizer_with_template(
            name, chat_template, name_key=f"{key}.tokenizer_name", template_key=f"{key}.chat_template"
        )
        return cls(tokenizer, max_length=max_length)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids, special tokens as the template writes them and no others. Raises ConversationTooLong."""
        text = self.tokenizer.apply_chat_template(
            messages_to_dicts(messages), tokenize=False, add_generation_prompt=False
        )
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        if self._max_length is not None and len(token_ids) > self._max_length:
            raise ConversationTooLong(f"a conversation of {len(token_ids)} tokens, where {self._max_length} fit")
        return token_ids


# By `api`: the path, the key of the tokens in the request, and where the answer's numbers are.
APIS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "vllm_classify": ("/classify", "input", lambda answer: answer["data"][0]["probs"]),
    "vllm_pooling": ("/pooling", "input", lambda answer: answer["data"][0]["data"]),
    "sglang_classify": ("/classify", "input_ids", lambda answer: _unwrap_single(answer)["embedding"]),
    "embeddings": ("/v1/embeddings", "input", lambda answer: answer["data"][0]["embedding"]),
}


class ClassifyScorer:
    """Sends the tokens of a conversation, so that no server adds a second BOS; the score is number `label`."""

    def __init__(self, name: str, section: ClassifyScorerConfig) -> None:
        self._section = section
        self._endpoint = Endpoint(f"scorers.{name}", section)
        self._tokens = ConversationTokenizer.load(
            f"scorers.{name}", section.tokenizer_name or section.model, chat_template=section.chat_template
        )

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await score_each(requests, self._score)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, request: ScoreRequest) -> float:
        path, tokens_key, extract_numbers = APIS[self._section.api]
        token_ids = self._tokens.encode(request.messages)
        body = {"model": self._section.model, tokens_key: token_ids}
        answer = await self._endpoint.post(path, body, num_tokens=len(token_ids))
        try:
            numbers = extract_numbers(answer)
            return float(numbers[self._section.label] if isinstance(numbers, list) else numbers)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EndpointError(f"{path}: no score number {self._section.label} in {str(answer)[:200]}") from error


def _unwrap_single(answer: Any) -> Any:
    """SGLang answers one request with an object or with a list of one."""
    return answer[0] if isinstance(answer, list) else answer
