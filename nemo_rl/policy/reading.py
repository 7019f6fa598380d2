"""`ReadingRank`: what a model on one rank says of whole batches, without gradients: a policy's, a teacher's."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl import batch as keys
from nemo_rl.errors import PolicyError
from nemo_rl.interfaces import RequiredScores, TokenScores, TopK
from nemo_rl.policy.micro_batches import MicroBatching, micro_batches
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.token_scores import LOGPROBS_ALONE
from nemo_rl.types import TrainingBatch


class ReadingRank(ABC):
    """A model on one rank of a layout, which shares the rows of a batch with the others.

    Every method is collective: it is called on all ranks, in the same order, with the same arguments, and a batch is
    the whole batch, of which a rank computes its rows.
    """

    module: nn.Module
    device: torch.device
    layout: RankLayout
    _model: PreTrainedModel  # Hugging Face's, for its configuration; its weights need not be there

    @abstractmethod
    def _scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        """This rank's rows and their scores, without gradients, a micro-batch at a time."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Everything that lies on the accelerator."""

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T] float32 on the CPU: log_softmax(logits / temperature) of the tokens with a mask, else 0.

        The whole batch's, on every rank.
        """
        return self._logprobs(self.module, batch)

    def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """The k most likely tokens before each token with a mask, and their log-probs: [B, T, k] on the CPU.

        Raises:
            PolicyError: k is above the vocabulary.
        """
        size = self._model.config.get_text_config().vocab_size
        if not 0 < k <= size:
            raise PolicyError(f"the {k} most likely of {size} tokens")
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for rows, scores in self._scores(self.module, batch, RequiredScores(topk=k)):
            assert scores.topk is not None
            length = scores.logprobs.shape[1]
            ids[rows, :length], logprobs[rows, :length] = scores.topk.ids.cpu(), scores.topk.logprobs.cpu()
        return TopK(self._of_all_ranks(ids), self._of_all_ranks(logprobs))

    def offload(self) -> None:
        """Move everything off the accelerator. Nothing on a CPU, or where it lives on the CPU anyway."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _logprobs(self, module: nn.Module, batch: TrainingBatch) -> torch.Tensor:
        result = torch.zeros(batch[keys.TOKEN_IDS].shape, dtype=torch.float32)
        for rows, scores in self._scores(module, batch, LOGPROBS_ALONE):
            result[rows, : scores.logprobs.shape[1]] = scores.logprobs.cpu()
        return self._of_all_ranks(result)

    def _of_all_ranks(self, result: torch.Tensor) -> torch.Tensor:
        """The rows of every rank, each of which has filled in its own."""
        return self.layout.summed(result if self.layout.speaks_for_its_row else result.zero_())


@torch.no_grad()
def scores_in_parts(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching | int,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """A rank's rows of a batch and their scores, micro-batches of `size` at a time; `module` is a CausalLogprobs."""
    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
    for rows, part in micro_batches(inputs, torch.arange(len(batch)), size, layout):
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        scores = module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, wanted, lengths=lengths)
        if len(rows) > 0:
            yield rows, scores
