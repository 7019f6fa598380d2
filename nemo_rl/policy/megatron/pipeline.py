"""Micro-batches through all stages, in Megatron's own order (one forward, one backward)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from nemo_rl import batch as keys
from nemo_rl.interfaces import RequiredScores, TokenScores, TopK
from nemo_rl.policy.megatron.cpu import calls_of_megatron
from nemo_rl.policy.micro_batches import MicroBatching, micro_batches
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.types import TrainingBatch

Part = tuple[torch.Tensor, TrainingBatch]  # rows of the batch, and the micro-batch itself


def score(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """A rank's rows of a batch and what is said of them, without gradients; the last stage alone has some.

    All micro-batches, of `size`, go through before the first is given; those done wait on the CPU.
    """

    def on_the_cpu(part: Part, scores: TokenScores, *, non_loss_data: bool) -> tuple[torch.Tensor, TokenScores]:
        topk = scores.topk and TopK(scores.topk.ids.cpu(), scores.topk.logprobs.cpu())
        return part[0], TokenScores(scores.logprobs.cpu(), topk=topk)

    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
    parts = list(micro_batches(inputs, torch.arange(len(batch)), size, layout))
    with torch.no_grad():
        read = _run(module, parts, wanted, on_the_cpu, device=device, forward_only=True, collect_non_loss_data=True)
    return ((rows, scores) for rows, scores in read if len(rows) > 0)


def learn(
    module: nn.Module,
    parts: Sequence[Part],
    wanted: RequiredScores,
    loss: Callable[[Part, TokenScores], tuple[torch.Tensor, Any]],
    *,
    device: torch.device,
) -> list[Any]:
    """Add the gradients of all losses up, over ranks too; what `loss` reports of each, on the last stage."""

    def summed(part: Part, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor, Any]:
        value, report = loss(part, scores)
        # The stage before waits for a gradient also where the loss reads no log-prob. A tensor of its own, of one
        # entry, since the schedule frees it before the backward pass.
        value = value.new_ones(1) * value + scores.logprobs.sum() * 0
        return value, torch.zeros((), dtype=torch.int, device=device), report

    return _run(module, parts, wanted, summed, device=device, forward_only=False)


def _run(
    module: nn.Module,
    parts: Sequence[Part],
    wanted: RequiredScores,
    read: Callable[..., Any],
    *,
    device: torch.device,
    **arguments: Any,
) -> list[Any]:
    def forward_step(iterator: Iterator[Part], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows, part = next(iterator)
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        asked = wanted if len(rows) else RequiredScores()  # of a rank without a sample left nothing is asked
        candidate_ids = None if asked.candidates is None else part[asked.candidates]
        scores = model(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, asked, candidate_ids, lengths)
        return scores, partial(read, (rows, part))

    width = max((part[keys.TOKEN_IDS].shape[1] for _, part in parts), default=1)
    with calls_of_megatron(device):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=[module],
            num_microbatches=len(parts),
            seq_length=width,
            micro_batch_size=max((len(part) for _, part in parts), default=1),
            **arguments,
        )
