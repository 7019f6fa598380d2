"""A transformers model as an engine: slow, exact, and repeatable to the bit. The reference for the others in tests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, DynamicCache

from nemo_rl.column_arrays import id_dtype
from nemo_rl.distributed.expert_routers import RouterOutput, find_routers
from nemo_rl.distributed.file_names import FilePart, file_parts
from nemo_rl.distributed.float32 import float32_product, round_as_engine
from nemo_rl.distributed.machine import compute_in_turn, release_openmp_threads
from nemo_rl.distributed.vision_towers import ImageEmbedder, RowImages, auto_class, sees
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.image_features import ImageTable
from nemo_rl.interfaces import Generation
from nemo_rl.token_columns import (
    NO_COLUMNS,
    TokenColumns,
    routed_experts_columns,
    sampling_mask_columns,
)
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams, WeightSpan
from nemo_rl.weight_manifests import Weights

MAX_SEED = 2**63 - 1


@dataclass(slots=True)
class Row:
    """One request while it is sampled."""

    request: GenerationRequest
    max_new_tokens: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # weight version per token
    routes: list[np.ndarray] = field(default_factory=list)  # per forward pass, [tokens, layers, k]
    sets: list[np.ndarray | None] = field(default_factory=list)  # ids that each token was drawn from, if recorded
    stopped: bool = False

    @property
    def is_done(self) -> bool:
        return self.stopped or len(self.token_ids) >= self.max_new_tokens

    def completion(self) -> Completion:
        spans = to_weight_spans(self.versions)
        return Completion(
            self.request.request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            "stop" if self.stopped else "length",
            weight_versions=(spans[0].version, spans[-1].version),
            weight_spans=spans if len(spans) > 1 else (),
            columns=self._routes().completed(
                sampling_mask_columns(self.sets, num_prompt_tokens=len(self.request.token_ids))
            ),
        )

    def _routes(self) -> TokenColumns:
        """Return the routes of the prompt's and the response's tokens; the last one was no input of the model."""
        if not self.routes:
            return NO_COLUMNS
        num_tokens = len(self.request.token_ids) + len(self.token_ids)
        return routed_experts_columns(np.concatenate(self.routes), num_tokens)


@dataclass(slots=True)
class Batch:
    """Requests that are sampled together until all are done."""

    rows: list[Row]
    next_logits: Iterator[torch.Tensor] | None = None  # holds keys and values; None until sampling starts
    pauses: int = 0  # pauses of the engine before keys and values were computed

    @property
    def is_done(self) -> bool:
        return all(row.is_done for row in self.rows)


class RouteRecorder:
    """Keeps the experts that a model routes the tokens of a forward pass to."""

    def __init__(self, model: nn.Module) -> None:
        """Observe the model's routers; raises GenerationError if it has none of a known kind."""
        routers = find_routers(model)
        if not routers:
            raise GenerationError(f"policy.router_replay: {type(model).__name__} has no router of a known kind")
        self._dtype = id_dtype(max(router.num_experts for router in routers))
        self._layers: list[np.ndarray] = []  # one forward pass's, [B * T, k]
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: Any, output: RouterOutput) -> None:
        self._layers.append(output[2].cpu().numpy().astype(self._dtype))

    def hand_over(self, rows: Sequence[Row], is_token: torch.Tensor) -> None:
        """Append the routes of the last forward pass to its rows, without those of padding; `is_token` is [B, T]."""
        routes = np.stack(self._layers, axis=1).reshape(*is_token.shape, len(self._layers), -1)
        self._layers.clear()
        for row, own, known in zip(rows, routes, is_token.numpy(), strict=True):
            row.routes.append(own[known])


class HFGeneration(Generation):
    """Samples batches of at most `max_batch_size` requests, in their order, each request with its own generator.

    The same batch gives the same bits; another batch the same log-probs up to rounding. A request whose prompt leaves
    no room in `max_model_len` (None: the model's maximum) is a FailedRequest. Work runs on a thread of its own. A pause
    takes effect at the next token. The engine never sleeps.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch_size: int = 64,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        records_routes: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        model: Any = auto_class(config).from_pretrained(
            model_path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
        self._model = model.to(device).eval()
        keep_float32_logits(self._model)
        if self._model.dtype == torch.bfloat16:  # as the policy does
            decoder = self._model.get_decoder() if sees(config) else self._model
            round_as_engine(decoder, decoder, on_cpu=device == "cpu")
        self._routes = RouteRecorder(self._model) if records_routes else None
        self._model_path = model_path
        self._device = device
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len or model.config.get_text_config().max_position_embeddings
        self._images = ImageEmbedder(model) if sees(config) else None
        self._weight_version = 0
        self._tokenizer: Any = None  # loaded when a request has stop strings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-generation")
        self._compute_lock = asyncio.Lock()  # held while a batch is computed, and while paused
        self._is_pausing = threading.Event()
        self._num_pauses = 0  # pauses that drop keys and values

    @property
    def is_async(self) -> bool:
        return False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        refused = {r.request_id: cause for r in requests if (cause := self._refusal(r))}
        for request in requests:
            if (cause := refused.get(request.request_id)) is not None:
                is_too_long = len(request.token_ids) >= self._max_model_len
                yield FailedRequest(request.request_id, cause, is_too_long=is_too_long)
        accepted = [request for request in requests if request.request_id not in refused]
        for start in range(0, len(accepted), self._max_batch_size):
            batch = Batch([self._make_row(request) for request in accepted[start : start + self._max_batch_size]])
            while not batch.is_done:
                async with self._compute_lock:
                    await self._run_cancellable(batch)
            for row in batch.rows:
                yield row.completion()

    async def _run_cancellable(self, batch: Batch) -> None:
        cancelled = threading.Event()
        release_openmp_threads()  # the event loop's
        running = asyncio.get_running_loop().run_in_executor(
            self._thread, compute_in_turn, self._sample, batch, cancelled
        )
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([running])
            raise

    def _refusal(self, request: GenerationRequest) -> str | None:
        length = len(request.token_ids)
        if not 0 < length < self._max_model_len:
            return f"a prompt of {length} tokens; it must have 1 to {self._max_model_len - 1}"
        if request.sampling.guide is not None:
            return "this engine cannot guide a response"
        if request.sampling.max_new_tokens < 1:
            return f"max_new_tokens is {request.sampling.max_new_tokens}"
        if request.images and self._images is None:
            return f"{len(request.images)} images for a model that reads text"
        vocab_size = self._model.config.get_text_config().vocab_size
        if not all(0 <= token < vocab_size for token in request.token_ids):
            return f"a token id outside the vocabulary of {vocab_size}"
        return None

    @torch.inference_mode()
    def _sample(self, batch: Batch, cancelled: threading.Event) -> None:
        """Sample until all rows are done or a pause; finished rows are still computed to keep shapes constant."""
        if batch.next_logits is None or batch.pauses != self._num_pauses:
            batch.next_logits, batch.pauses = self._forward(batch.rows), self._num_pauses
        while not (batch.is_done or cancelled.is_set() or self._is_pausing.is_set()):
            logits = next(batch.next_logits)  # [B, V] on the CPU
            if logits.isnan().any():
                raise GenerationError("the model's logits are not numbers")
            for row, row_logits in zip(batch.rows, logits, strict=True):
                if not row.is_done:
                    self._extend(row, row_logits)

    def _make_row(self, request: GenerationRequest) -> Row:
        room = self._max_model_len - len(request.token_ids)
        generator = torch.Generator().manual_seed(request.seed & MAX_SEED)
        return Row(request, min(request.sampling.max_new_tokens, room), generator)

    def _forward(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield logits of each row's next token, [B, V], without end; rows are padded on the left."""
        known = [(*row.request.token_ids, *row.token_ids) for row in rows]
        width = max(len(each) for each in known)
        token_ids = torch.zeros(len(rows), width, dtype=torch.int64)  # [B, T]
        mask = torch.zeros(len(rows), width, dtype=torch.int64)  # [B, T]
        for index, each in enumerate(known):
            token_ids[index, width - len(each) :] = torch.tensor(each)
            mask[index, width - len(each) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B, T], or [3, B, T] with images of two dimensions
        tokens: dict[str, Any] = {"input_ids": token_ids.to(self._device)}
        if any(row.request.images for row in rows):
            tokens, positions = self._image_inputs(rows, token_ids, positions, [len(each) for each in known])
        cache = DynamicCache(config=self._model.config)
        for row in rows:
            row.routes.clear()  # those of keys and values that are gone
        while True:
            output = self._model(
                **tokens,
                attention_mask=mask.to(self._device),
                position_ids=positions.to(self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            if self._routes is not None:
                self._routes.hand_over(rows, mask[:, -token_ids.shape[1] :].bool())
            yield output.logits[:, -1].float().cpu()
            token_ids = torch.tensor([[row.token_ids[-1]] for row in rows])
            tokens = {"input_ids": token_ids.to(self._device)}
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.int64)], dim=-1)
            positions = positions[..., -1:] + 1

    def _image_inputs(
        self, rows: Sequence[Row], token_ids: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Return a model's inputs in place of left-padded tokens [B, T] of these lengths, and their positions."""
        assert self._images is not None  # else `_refusal`
        width, padding = token_ids.shape[1], [token_ids.shape[1] - length for length in lengths]
        shifted = [[one.shifted(n) for one in row.request.images] for row, n in zip(rows, padding, strict=True)]
        table, numbers = ImageTable.lay_out(shifted, width)
        images = RowImages(torch.from_numpy(numbers).to(self._device), table)
        inputs = self._images.embed(token_ids.to(self._device), images)
        on_right = [torch.stack([row.roll(-n) for row, n in zip(part, padding, strict=True)])
                    for part in (token_ids, images.rows.cpu())]  # fmt: skip
        own = self._images.positions(on_right[0], lengths, RowImages(on_right[1], table))
        if own is not None:
            positions = torch.stack([own[:, i].roll(n, dims=-1) for i, n in enumerate(padding)], dim=1)
        return inputs, positions

    def _extend(self, row: Row, logits: torch.Tensor) -> None:
        sampling = row.request.sampling
        if sampling.temperature > 0:
            logits = filter_logits(logits / sampling.temperature, sampling)
        token, logprob = sample_token(logits, row.generator if sampling.temperature > 0 else None)
        if sampling.needs_sampling_mask:
            row.sets.append(logits.isfinite().nonzero()[:, 0].numpy())
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        row.versions.append(self._weight_version)
        row.stopped = token in sampling.stop_token_ids or self._ends_with_stop_string(row)

    def _ends_with_stop_string(self, row: Row) -> bool:
        if not row.request.sampling.stop_strings:
            return False
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        text = self._tokenizer.decode(row.token_ids, skip_special_tokens=True)
        return any(stop in text for stop in row.request.sampling.stop_strings)

    async def pause(self, *, keep_cache: bool = False) -> None:
        self._is_pausing.set()
        try:
            await self._compute_lock.acquire()
        finally:  # the lock now stops sampling; a cancelled pause must not
            self._is_pausing.clear()
        self._num_pauses += not keep_cache

    async def resume(self) -> None:
        self._compute_lock.release()

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, compute_in_turn, self._load, manifest)
        self._weight_version = weight_version

    @torch.no_grad()
    def _load(self, manifest: Weights) -> None:
        tensors, state = dict(map_weights(manifest)), self._model.state_dict()
        parts = file_parts(self._model) or {name: FilePart(name) for name in state}
        trained = {name for name, _ in self._model.named_parameters()}
        needed = {name for name, part in parts.items() if part.tensor in trained}
        unknown, missing = tensors.keys() - parts.keys(), needed - tensors.keys()
        if unknown or missing:
            raise WeightSyncError(f"weights unknown to the engine: {sorted(unknown)}; missing: {sorted(missing)}")
        for name, tensor in tensors.items():
            parts[name].of(state[parts[name].tensor]).copy_(tensor)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def keep_float32_logits(model: Any) -> None:
    """Let the output layer of a bfloat16 model return float32 sums, as the policy's logits are.

    A layer with a bias is left as it is, as in the policy (policy/logprobs.py).
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None or layer.weight.dtype != torch.bfloat16:
        return
    setattr(layer, "forward", partial(float32_product, weight=layer.weight))  # noqa: B010


def to_weight_spans(versions: Sequence[int]) -> tuple[WeightSpan, ...]:
    """Return the spans of equal versions, given the version of each token."""
    spans: list[WeightSpan] = []
    for version, same in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(WeightSpan(version, start, start + sum(1 for _ in same)))
    return tuple(spans)


def sample_token(logits: torch.Tensor, generator: torch.Generator | None) -> tuple[int, float]:
    """Sample a token from [V] logits, or take the likeliest without a generator; return it with its log-prob."""
    logprobs = logits.log_softmax(-1)
    greedy = generator is None
    token = int(logits.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def filter_logits(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Set logits to -inf that are not among the `top_k` best or not in the smallest set of probability `top_p`."""
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all better tokens
        logits = logits.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    return logits
