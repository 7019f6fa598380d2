"""A teacher behind an OpenAI-compatible server such as vLLM: top-k log-probs of prompt tokens over HTTP.

`POST /v1/completions` with the prompt as token ids, `prompt_logprobs` and `max_tokens: 1`. Servers answer for the
model's own distribution: the temperature is 1.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl import batch as keys
from nemo_rl.config.endpoint import ServedModelConfig
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.interfaces import TopK
from nemo_rl.types import TrainingBatch

PATH = "/v1/completions"
TOO_MANY = "max allowed"  # in vLLM's refusal of more log-probs than its --max-logprobs

PromptLogprobs = Sequence[Mapping[str, Mapping[str, Any]] | None]  # a token: by id, its log-prob and more


class ServedTeacher:
    """Satisfies interfaces.Teacher. Rows of a batch are asked for one by one, at once as far as `limits` let them.

    A server that does not answer as it should, after all retries, is a PolicyError that names it. Used in one event
    loop.
    """

    def __init__(self, key: str, section: ServedModelConfig) -> None:
        """`key` is the section's own, for errors; raises ConfigError where `api_key_env` is not set."""
        self._key = key
        self._section = section
        self._endpoint = Endpoint(key, section)

    async def check(self, k: int, *, num_tokens: int = 2) -> None:
        """Ask once, before anything else is started: raises ConfigError for a k that the server refuses, PolicyError
        for one that does not answer, or not for a sequence of so many tokens."""
        await self._ask([0] * num_tokens, k)

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T] float32: of each token with a mask, else 0."""
        result = torch.zeros(batch[keys.TOKEN_IDS].shape)
        for row, answer in enumerate(await self._answers(batch, k=0)):
            for place in _places(batch, row):
                result[row, place] = _logprob(answer[place], int(batch[keys.TOKEN_IDS][row, place]))
        return result

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """The k most likely tokens before each token with a mask: [B, T, k]; raises ConfigError for too large a k."""
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, answer in enumerate(await self._answers(batch, k=k)):
            places = _places(batch, row)
            if not places:
                continue
            best = [_most_likely(answer[place], k) for place in places]
            ids[row, places] = torch.tensor([[token_id for token_id, _ in tokens] for tokens in best])
            logprobs[row, places] = torch.tensor([[logprob for _, logprob in tokens] for tokens in best])
        return TopK(ids, logprobs)

    async def offload(self) -> None:
        """The server's memory is its own."""

    async def onload(self) -> None: ...

    async def close(self) -> None:
        await self._endpoint.close()

    async def _answers(self, batch: TrainingBatch, *, k: int) -> list[PromptLogprobs]:
        """One a row; rows without a masked token are not asked for."""
        prompts = [
            batch[keys.TOKEN_IDS][row, : int(batch[keys.LENGTHS][row])].tolist() if _places(batch, row) else []
            for row in range(len(batch))
        ]
        tasks = [asyncio.create_task(self._ask(prompt, k)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error ends all
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, token_ids: list[int], k: int) -> PromptLogprobs:
        if not token_ids:
            return ()
        body = {
            "model": self._section.model,
            "prompt": token_ids,
            "prompt_logprobs": k,
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
        }
        try:
            answer = await self._endpoint.post(PATH, body, num_tokens=len(token_ids))
        except EndpointError as error:
            if TOO_MANY in str(error):
                raise ConfigError(
                    "distillation.topk_logits_k", k, f"more than the teacher's server gives (--max-logprobs): {error}"
                ) from error
            raise PolicyError(f"the teacher of {self._key}: {error}") from error
        return self._checked(answer, token_ids)

    def _checked(self, answer: Any, token_ids: list[int]) -> PromptLogprobs:
        try:
            found = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise PolicyError(
                f"the teacher of {self._key} gave no log-probs of the {len(token_ids)} prompt tokens: is it a vLLM "
                f"server? {str(answer)[:200]}"
            )
        return found


def _places(batch: TrainingBatch, row: int) -> list[int]:
    """Tokens of a row that are asked about; nothing precedes the first."""
    return [place for place in (batch[keys.TOKEN_MASK][row] > 0).nonzero().flatten().tolist() if place > 0]


def _logprob(entry: Mapping[str, Mapping[str, Any]] | None, token_id: int) -> float:
    found = (entry or {}).get(str(token_id))
    if found is None:
        raise PolicyError(f"the teacher's server left out the log-prob of token {token_id}")
    return _number(found)


def _most_likely(entry: Mapping[str, Mapping[str, Any]] | None, k: int) -> list[tuple[int, float]]:
    """The k best; the server adds the prompt's own token to them where it is none."""
    tokens = [(int(token_id), _number(found)) for token_id, found in (entry or {}).items()]
    if len(tokens) < k:
        raise PolicyError(f"the teacher's server gave {len(tokens)} of the {k} most likely tokens")
    return sorted(tokens, key=lambda token: (-token[1], token[0]))[:k]


def _number(found: Mapping[str, Any]) -> float:
    logprob = float(found["logprob"])
    if math.isnan(logprob):
        raise PolicyError("the teacher's server gave a log-prob that is no number")
    return logprob
