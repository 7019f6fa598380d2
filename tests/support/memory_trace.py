"""Peak memory of a policy rank from fake tensors: the real modules run without data, so no GPU and no model is needed.

Every tensor of a pass is fake (a shape without values), the other ranks are torch's fake process group, and attention
keeps what PyTorch's flash kernels keep. What is counted are live bytes of tensors: neither the allocator's unused
blocks nor the CUDA context. policy/memory.py has the closed form that is tested against these figures.
"""

import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nemo_rl.config.policy import PolicyConfig, resolve_chunk_size
from nemo_rl.loss_types import TokenScores
from nemo_rl.policy import context_parallel, log_softmax
from nemo_rl.policy.attention import PackedSequences
from nemo_rl.policy.context_parallel import ContextRanks, SlicedSequences
from nemo_rl.policy.fsdp2.backend import TrainedDTensorConfig
from nemo_rl.policy.fsdp2.lora import Adapters
from nemo_rl.policy.fsdp2.sharding import cast_frozen, kept_unsharded, needs_sharding, reduce_next_gradients, shard
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs, ScoreQuery
from nemo_rl.policy.optimizers import make_optimizer
from nemo_rl.policy.ranks import RankLayout, context_group, device_mesh

TRACED_ATTENTION = "nemo_rl_traced"  # transformers looks names with "flash" up on the hub
CPU = torch.device("cpu")  # of the fake tensors: FSDP2 asks a CUDA device for streams, which only a real one has


@dataclass(frozen=True, slots=True)
class TraceCase:
    """A model on one of several ranks, and the tokens of one micro-batch."""

    model: PreTrainedConfig
    policy: PolicyConfig
    layout: RankLayout
    tokens: int

    @property
    def section(self) -> TrainedDTensorConfig:
        return self.policy.section_of(TrainedDTensorConfig)

    def with_layers(self, number: int) -> "TraceCase":
        """Return the case for a model of that many layers, equal otherwise."""
        values = self.model.to_dict() | {"num_hidden_layers": number, "layer_types": None}
        return replace(self, model=type(self.model).from_dict(values))


@dataclass(frozen=True, slots=True)
class TracedPeaks:
    """Largest sums of live bytes on one rank; each includes the resident ones."""

    resident: int  # this rank's shards of the weights, which stay
    scoring: int  # of a pass without gradients; no gradient and no optimizer state exists
    head: int  # of forward passes and of the output layer's backward pass, beside gradients and optimizer state
    layers: int  # of the decoder layers' backward passes
    reduction: int  # after them: gradients of embedding and output layer are reduced over the ranks
    optimizer_step: int

    @property
    def training(self) -> int:
        """Return the largest of an optimizer step with several micro-batches."""
        return max(self.head, self.layers, self.reduction, self.optimizer_step)


def trace_peaks(cases: Sequence[TraceCase]) -> list[TracedPeaks]:
    """Return the peaks of each case; all have the same number of ranks.

    They are traced in a process of their own, since a process is in one process group only.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_trace_all, list(cases)).result()


def extrapolate(few: TracedPeaks, more: TracedPeaks, *, layers: tuple[int, int], to: int) -> TracedPeaks:
    """Return the peaks for `to` layers from those for two smaller numbers: each phase is linear in layers.

    Example: 10 bytes for 2 layers and 14 for 4 are 2 a layer and 6 besides, so 62 for 28.
    """

    def line(name: str) -> int:
        start, end = getattr(few, name), getattr(more, name)
        return round(start + (end - start) * (to - layers[0]) / (layers[1] - layers[0]))

    return TracedPeaks(**{part.name: line(part.name) for part in fields(TracedPeaks)})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have returned and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self.now = 0
        self.peaks: dict[str, int] = {}  # by phase
        self.phase = ""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors from now on, those that are counted already once."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            self._set(weakref.ref(storage, self._forget), storage.nbytes())

    def peak_of(self, function: Callable[[], object]) -> int:
        """Return the largest sum during a call."""
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 frees a gathered layer with it
            result = resize(storage, size)
            reference = weakref.ref(storage, self._forget)
            if reference in self._sizes:
                self._set(reference, storage.nbytes())
            return result

        self.peaks.clear()
        self.begin("")
        with self, mock.patch.object(torch.UntypedStorage, "resize_", counted_resize):
            function()
        return max(self.peaks.values())

    def begin(self, phase: str) -> None:
        """Attribute peaks to `phase` from now on."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)

    def _set(self, storage: "weakref.ref[torch.UntypedStorage]", size: int) -> None:
        self.now += size - self._sizes.get(storage, 0)
        self._sizes[storage] = size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)

    def _forget(self, storage: "weakref.ref[torch.UntypedStorage]") -> None:
        self.now -= self._sizes.pop(storage, 0)


def _trace_all(cases: list[TraceCase]) -> list[TracedPeaks]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # of tests of torch, but installed with it

    layout = cases[0].layout
    dist.init_process_group("fake", rank=layout.rank, world_size=layout.world_size, store=FakeStore())
    AttentionInterface.register(TRACED_ATTENTION, _flash_attention_forward)
    with (
        mock.patch.object(log_softmax, "CPU_BLOCK", log_softmax.ACCELERATOR_BLOCK),
        mock.patch.object(context_parallel, "packed_attention_forward", _flash_attention_forward),
    ):
        return [_trace(case) for case in cases]


def _trace(case: TraceCase) -> TracedPeaks:
    device_mesh(case.layout, CPU)  # made of real tensors, then kept
    size = case.layout.context_parallel_size
    ranks = ContextRanks(context_group(case.layout), 0, size) if size > 1 else None
    pack = None if ranks is None else SlicedSequences.of(PackedSequences.of((case.tokens,), case.tokens, CPU), ranks)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = _build(case)
        module.pack = pack
        live.add(module.parameters())
        resident = live.now
        optimizer = make_optimizer(case.policy, [p for p in module.parameters() if p.requires_grad])
        num_tokens = case.tokens // size
        scored = min(num_tokens, 2048)  # two chunks and more take the same
        inputs = torch.zeros((1, num_tokens), dtype=torch.int64), torch.zeros(scored, dtype=torch.int64)

        keeps = case.section.keep_unsharded is True

        def score() -> None:
            with torch.no_grad(), kept_unsharded(module, is_enabled=keeps):
                module(*inputs)

        def train() -> None:
            with kept_unsharded(module, is_enabled=keeps):
                for is_last in (False, True):  # the second beside the gradients of the first
                    if is_last:
                        reduce_next_gradients(module)
                    live.begin("head")
                    module(*inputs).logprobs.sum().backward()

        module.on_backward = live.begin
        scoring = live.peak_of(score)
        live.peak_of(train)
        live.peak_of(optimizer.step)  # makes its state
        live.peak_of(lambda: optimizer.zero_grad(set_to_none=True))
        live.peak_of(train)
        peaks = dict(live.peaks)
        return TracedPeaks(
            resident,
            scoring,
            head=peaks["head"],
            layers=peaks["layers"],
            reduction=peaks.get("reduction", 0),
            optimizer_step=live.peak_of(optimizer.step),
        )


def _build(case: TraceCase) -> "_TracedLogprobs":
    model: Any = AutoModelForCausalLM.from_config(case.model, dtype=torch.float32)
    model.set_attn_implementation(TRACED_ATTENTION)
    if case.section.lora_cfg.enabled:
        with mock.patch.object(nn.Module, "to", lambda moved, *args, **kwargs: moved):  # which fake tensors refuse
            Adapters(model, case.section.lora_cfg, base="traced")
    chunk_size = resolve_chunk_size(case.policy.logprob_chunk_size, case.model.get_text_config().vocab_size)
    module = _TracedLogprobs(model, temperature=1.0, chunk_size=chunk_size)
    if case.section.activation_checkpointing:
        recompute_activations(decoder_layers(model))
    if case.policy.precision == "bfloat16":
        cast_frozen(module)
    if case.layout.world_size > 1 or needs_sharding(case.policy, case.layout, CPU):
        shard(module, case.policy, case.layout, CPU)
    return module


class _TracedLogprobs(CausalLogprobs):
    """`CausalLogprobs` that scores given positions, since fake masks have no values to look them up in."""

    on_backward: Callable[[str], None]  # called with the name of each phase of the backward pass
    pack: SlicedSequences | None  # of several ranks that share a row

    def forward(self, token_ids: torch.Tensor, at: torch.Tensor) -> TokenScores:  # type: ignore[override]
        embedded: Any = self.model.get_input_embeddings()
        mark = embedded.register_forward_hook(lambda layer, args, output: self._mark(output, "reduction"))
        inputs = {"input_ids": token_ids} if self.pack is None else {"input_ids": token_ids, "pack": self.pack}
        hidden = self._hidden_states(inputs).flatten(0, 1).index_select(0, at)
        mark.remove()
        self._mark(hidden, "layers")
        return self._score_in_chunks(hidden, ScoreQuery(at))

    def _mark(self, tensor: torch.Tensor, phase: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.on_backward(phase))

    def _supports_chunked_logits(self, probe: PreTrainedModel) -> bool:
        return True


def _flash_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return a tensor of the attention's shape, from [B, heads, T, width] to [B, T, heads, width]."""
    return _FlashAttention.apply(query, key, value), None  # type: ignore[return-value]


class _FlashAttention(torch.autograd.Function):
    """The memory of flash attention 2 (arXiv 2307.08691): inputs, output and log-sum-exp are kept, no [T, T] tensor.

    The backward pass accumulates dQ in float32, and dK and dV for each query head before they are summed over groups.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, width = query.shape
        output = query.new_empty((batch, length, heads, width))
        logsumexp = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        accumulated = torch.empty_like(query, dtype=torch.float32)
        expanded = [torch.empty_like(query) for _ in range(2)]
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del accumulated, expanded
        return result
