"""A teacher served by vLLM over HTTP: log-probs of prompts, one request per sample."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl import batch as keys
from nemo_rl.config.policy import ServedModelConfig
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.loss_types import TopK
from nemo_rl.types import TrainingBatch

PATH = "/v1/completions"
TOO_MANY_LOGPROBS = "max allowed"  # words of vLLM's refusal of more log-probs than its --max-logprobs

PromptLogprobs = Sequence[Mapping[str, Mapping[str, Any]] | None]  # per token: by id, its log-prob and more


class ServedTeacher:
    """A vLLM server that scores tokens; satisfies `interfaces.Teacher`. Used in one event loop.

    Each row of a batch is one request, as many at once as `limits` allow. After all retries, a server that does not
    answer as expected raises PolicyError with its name.
    """

    def __init__(self, key: str, section: ServedModelConfig) -> None:
        """Connect to the section's servers; raises ConfigError if `api_key_env` is not set.

        `key` is that of the section, for errors.
        """
        self._key = key
        self._section = section
        self._endpoint = Endpoint(key, section)

    async def check(self, k: int, *, num_tokens: int = 2) -> None:
        """Send one request of `num_tokens` tokens, before anything else is started.

        Raises:
            ConfigError: a k that the server refuses.
            PolicyError: a server that does not answer, or not for a sequence of this length.
        """
        await self._request_prompt_logprobs([0] * num_tokens, k)

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the log-prob of each token with a mask, else 0: [B, T] float32."""
        result = torch.zeros(batch[keys.TOKEN_IDS].shape)
        for row, answer in enumerate(await self._prompt_logprobs(batch, k=0)):
            for position in _masked_positions(batch, row):
                result[row, position] = _logprob(answer[position], int(batch[keys.TOKEN_IDS][row, position]))
        return result

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """Return the k most likely tokens at each token with a mask, [B, T, k].

        Raises ConfigError when the server allows fewer than k.
        """
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, answer in enumerate(await self._prompt_logprobs(batch, k=k)):
            positions = _masked_positions(batch, row)
            if not positions:
                continue
            best = [_topk(answer[position], k) for position in positions]
            ids[row, positions] = torch.tensor([[token_id for token_id, _ in tokens] for tokens in best])
            logprobs[row, positions] = torch.tensor([[logprob for _, logprob in tokens] for tokens in best])
        return TopK(ids, logprobs)

    async def offload(self) -> None:
        """Do nothing: the server has memory of its own."""

    async def onload(self) -> None:
        """Do nothing: the server has memory of its own."""

    async def close(self) -> None:
        await self._endpoint.close()

    async def _prompt_logprobs(self, batch: TrainingBatch, *, k: int) -> list[PromptLogprobs]:
        """Return one answer per row; rows without a token with a mask are not requested."""
        prompts = [
            batch[keys.TOKEN_IDS][row, : int(batch[keys.LENGTHS][row])].tolist()
            if _masked_positions(batch, row)
            else []
            for row in range(len(batch))
        ]
        tasks = [asyncio.create_task(self._request_prompt_logprobs(prompt, k)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error cancels the other requests
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request_prompt_logprobs(self, token_ids: list[int], k: int) -> PromptLogprobs:
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
            if TOO_MANY_LOGPROBS in str(error):
                raise ConfigError(
                    "distillation.topk_logits_k", k, f"more than the teacher's server returns (--max-logprobs): {error}"
                ) from error
            raise PolicyError(f"the teacher of {self._key}: {error}") from error
        return self._parse_prompt_logprobs(answer, token_ids)

    def _parse_prompt_logprobs(self, answer: Any, token_ids: list[int]) -> PromptLogprobs:
        try:
            found = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise PolicyError(
                f"the teacher of {self._key} returned no log-probs of the {len(token_ids)} prompt tokens: is it a vLLM "
                f"server? {str(answer)[:200]}"
            )
        return found


def _masked_positions(batch: TrainingBatch, row: int) -> list[int]:
    """Return the positions of a row's tokens with a mask, except the first token, which nothing precedes."""
    return [position for position in (batch[keys.TOKEN_MASK][row] > 0).nonzero().flatten().tolist() if position > 0]


def _logprob(entry: Mapping[str, Mapping[str, Any]] | None, token_id: int) -> float:
    found = (entry or {}).get(str(token_id))
    if found is None:
        raise PolicyError(f"the teacher's server returned no log-prob of token {token_id}")
    return _to_logprob(found)


def _topk(entry: Mapping[str, Mapping[str, Any]] | None, k: int) -> list[tuple[int, float]]:
    """Return the k most likely tokens; the server adds the prompt's own token if it is not among them."""
    tokens = [(int(token_id), _to_logprob(found)) for token_id, found in (entry or {}).items()]
    if len(tokens) < k:
        raise PolicyError(f"the teacher's server returned {len(tokens)} of the {k} most likely tokens")
    return sorted(tokens, key=lambda token: (-token[1], token[0]))[:k]


def _to_logprob(found: Mapping[str, Any]) -> float:
    logprob = float(found["logprob"])
    if math.isnan(logprob):
        raise PolicyError("the teacher's server returned NaN as a log-prob")
    return logprob
