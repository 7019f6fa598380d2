"""A frozen model of the policy's backend: it is asked for log-probs, and has neither optimizer nor gradients."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nemo_rl import batch as keys
from nemo_rl.config.policy import ServedModelConfig, TeacherConfig
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.distributed.machine import resolve_device
from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.interfaces import RequiredScores, TokenScores, TopK
from nemo_rl.policy.base_rank import ScoringWorker, score_micro_batches
from nemo_rl.policy.hf_model import load_config, load_model
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import teacher_micro_batching
from nemo_rl.policy.ranks import SINGLE_RANK, PolicyThread, RankLayout
from nemo_rl.policy.sharding import check_tensor_parallel, frozen_needs_sharding, shard
from nemo_rl.types import TrainingBatch


class TeacherWorker(ScoringWorker):
    """The teacher on one rank of a layout, whichever backend computes; weights are in `precision`, dropout is off.

    Args:
        config: a section `teacher`; `layout`, not the section, says how many ranks there are.
        section: its key, for errors.
        layout: this rank's place, and how it finds the others.
        model_path: a Hugging Face name or a folder that every rank can read.
        temperature: the logits are divided by it: that of the policy's sampling.

    Raises:
        ConfigError: a model, override, device or layout that cannot be had.
        PolicyError: the other ranks did not come before the deadline.
    """

    def __init__(
        self, config: TeacherConfig, *, section: str, layout: RankLayout, model_path: str, temperature: float
    ) -> None:
        self.config = config
        self._section = section
        self.layout = layout
        self.device = resolve_device(config.device)
        self._build_model(model_path, temperature=temperature)

    @abstractmethod
    def _build_model(self, model_path: str, *, temperature: float) -> None:
        """The model: the last step of the constructor."""


class FSDP2TeacherWorker(TeacherWorker):
    """A teacher by FSDP2 and DTensor. FSDP2 holds the weights among several ranks and for `cpu_offload`, else they are
    whole. Arguments and errors are those of `TeacherWorker`."""

    def _build_model(self, model_path: str, *, temperature: float) -> None:
        config, layout, section = self.config, self.layout, self._section
        if layout.tensor_parallel_size > 1:
            model_config = load_config(model_path, config.hf_config_overrides, section=section)
            check_tensor_parallel(layout.tensor_parallel_size, model_config, section=section)
        self._model = load_model(model_path, config.hf_config_overrides, section=section)
        module = CausalLogprobs(
            self._model,
            temperature=temperature,
            chunk_size=config.logprob_chunk_size,
            packing_key=f"{section}.sequence_packing.enabled" if config.sequence_packing.enabled else None,
        )
        self.module = module.requires_grad_(False)
        if config.precision == "bfloat16":  # parameters alone: buffers such as rotary frequencies stay float32
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if frozen_needs_sharding(config, layout, self.device):
            shard(self.module, config, layout, self.device)  # and bring it to the device, or leave it off
        else:
            self.module.to(self.device)

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = teacher_micro_batching(self.config, self._section)
        return score_micro_batches(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.dtensor_cfg.cpu_offload:
            return
        self.module.to(device)
        torch.cuda.empty_cache()


class LocalTeacher:
    """A `FSDP2TeacherWorker` in this process, on a thread of its own; satisfies `interfaces.TeacherConfig`."""

    def __init__(self, config: TeacherConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        """`arguments` are those of `TeacherWorker`."""
        self._thread = PolicyThread("teacher")
        try:
            self._worker = self._thread.run_blocking(partial(FSDP2TeacherWorker, config, layout=layout, **arguments))
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._worker.logprobs, batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._thread.run(self._worker.topk_logprobs, batch, k)

    async def offload(self) -> None:
        await self._thread.run(self._worker.offload)

    async def onload(self) -> None:
        await self._thread.run(self._worker.onload)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._thread.close()


PATH = "/v1/completions"
TOO_MANY_LOGPROBS = "max allowed"  # in vLLM's refusal of more log-probs than its --max-logprobs

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
        await self._request_prompt_logprobs([0] * num_tokens, k)

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T] float32: of each token with a mask, else 0."""
        result = torch.zeros(batch[keys.TOKEN_IDS].shape)
        for row, answer in enumerate(await self._prompt_logprobs(batch, k=0)):
            for position in _masked_positions(batch, row):
                result[row, position] = _logprob(answer[position], int(batch[keys.TOKEN_IDS][row, position]))
        return result

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """The k most likely tokens before each token with a mask: [B, T, k]; raises ConfigError for too large a k."""
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
        """The server's memory is its own."""

    async def onload(self) -> None: ...

    async def close(self) -> None:
        await self._endpoint.close()

    async def _prompt_logprobs(self, batch: TrainingBatch, *, k: int) -> list[PromptLogprobs]:
        """One a row; rows without a masked token are not asked for."""
        prompts = [
            batch[keys.TOKEN_IDS][row, : int(batch[keys.LENGTHS][row])].tolist()
            if _masked_positions(batch, row)
            else []
            for row in range(len(batch))
        ]
        tasks = [asyncio.create_task(self._request_prompt_logprobs(prompt, k)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error ends all
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
                    "distillation.topk_logits_k", k, f"more than the teacher's server gives (--max-logprobs): {error}"
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
                f"the teacher of {self._key} gave no log-probs of the {len(token_ids)} prompt tokens: is it a vLLM "
                f"server? {str(answer)[:200]}"
            )
        return found


def _masked_positions(batch: TrainingBatch, row: int) -> list[int]:
    """Tokens of a row that are asked about; nothing precedes the first."""
    return [position for position in (batch[keys.TOKEN_MASK][row] > 0).nonzero().flatten().tolist() if position > 0]


def _logprob(entry: Mapping[str, Mapping[str, Any]] | None, token_id: int) -> float:
    found = (entry or {}).get(str(token_id))
    if found is None:
        raise PolicyError(f"the teacher's server left out the log-prob of token {token_id}")
    return _to_logprob(found)


def _topk(entry: Mapping[str, Mapping[str, Any]] | None, k: int) -> list[tuple[int, float]]:
    """The k best; the server adds the prompt's own token to them where it is none."""
    tokens = [(int(token_id), _to_logprob(found)) for token_id, found in (entry or {}).items()]
    if len(tokens) < k:
        raise PolicyError(f"the teacher's server gave {len(tokens)} of the {k} most likely tokens")
    return sorted(tokens, key=lambda token: (-token[1], token[0]))[:k]


def _to_logprob(found: Mapping[str, Any]) -> float:
    logprob = float(found["logprob"])
    if math.isnan(logprob):
        raise PolicyError("the teacher's server gave a log-prob that is no number")
    return logprob
