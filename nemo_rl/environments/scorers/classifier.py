"""A Hugging Face sequence classifier with one label: loading, and scores of many conversations.

Batching does not change scores: each equals that of a forward pass of its row alone. N rows, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from nemo_rl.distributed.devices import resolve_device
from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.scorers.conversation_tokenizer import ConversationTokenizer
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.types import Failure, FailureClass, Message, ResponseFault

Row: TypeAlias = Sequence[int]  # token ids
Layout: TypeAlias = Callable[[PreTrainedModel, Sequence[Row]], torch.Tensor]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # absolute below a score of 1, relative above
PROBE_LENGTHS = (5, 2, 9)  # tokens
Conversation: TypeAlias = tuple[Message, ...]


class RewardModel:
    """A loaded reward model with its tokenizer; used by one thread.

    Raises ConfigError below `scorers.<name>` for a model that cannot be loaded, or not be scored exactly.
    """

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        key = f"scorers.{name}"
        device = resolve_device(section.device, f"{key}.device")
        model = load_classifier(f"{key}.model_name", section.model_name, precision=section.precision)
        self._model = model.to(device)  # pyright: ignore[reportArgumentType]
        self._layout = score_packed if section.packing else score_padded
        named, value = ("packing", True) if section.packing else ("model_name", section.model_name)
        check_layout_exact(f"{key}.{named}", value, self._model, self._layout)
        self._micro_batch_size = section.micro_batch_size
        self._tokenizer = ConversationTokenizer.load(
            key,
            section,
            section.model_name,
            max_length=clamp_to_positions(self._model, section.max_length),
        )

    @torch.inference_mode()
    def score(self, conversations: Sequence[Conversation]) -> list[float | Failure | ResponseFault]:
        """Return one score per conversation, in order.

        A response that makes its conversation too long or breaks the template is a ResponseFault. A prompt that cannot
        be rendered fails alone, an error of a forward pass fails its micro-batch.
        """
        rows: dict[int, list[int]] = {}
        scores: dict[int, float | Failure | ResponseFault] = {}
        for index, conversation in enumerate(conversations):
            result = self._encode(conversation)
            if isinstance(result, Failure | ResponseFault):
                scores[index] = result
            else:
                rows[index] = result
        indices = list(rows)
        for batch in iter_micro_batches(list(rows.values()), self._micro_batch_size):
            batch_scores = self._forward([rows[indices[i]] for i in batch])
            scores |= {indices[i]: score for i, score in zip(batch, batch_scores, strict=True)}
        return [scores[index] for index in range(len(conversations))]

    def _encode(self, conversation: Conversation) -> list[int] | Failure | ResponseFault:
        try:
            token_ids = self._tokenizer.encode_response(conversation)
        except Exception as error:  # too long, or an exception of the chat template  # noqa: BLE001
            return error_to_failure(error, FailureClass.REWARD)
        return token_ids or Failure(FailureClass.REWARD, "the conversation has no tokens")

    def _forward(self, rows: Sequence[Sequence[int]]) -> Sequence[float | Failure]:
        try:
            return self._layout(self._model, rows).tolist()
        except (RuntimeError, IndexError) as error:  # out of memory; a token id outside the vocabulary
            return [error_to_failure(error, FailureClass.REWARD)] * len(rows)


def load_classifier(
    key: str, name: str, *, precision: Literal["float32", "bfloat16"] = "float32", fresh_head: bool = False
) -> PreTrainedModel:
    """Return the classifier of a Hugging Face name or directory, on the CPU, without dropout.

    `fresh_head` replaces the head of any model by an untrained one of one label.

    Raises:
        ConfigError: under `key`, for a name without a model, a model with more labels, or files that lack weights.
    """
    config = _load_single_label_config(key, name, fresh_head)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=getattr(torch, precision), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"cannot be loaded as a sequence classifier: {str(error).splitlines()[0]}"
        raise ConfigError(key, name, problem) from error
    model, info = loaded
    if info["missing_keys"] and not fresh_head:
        missing = sorted(info["missing_keys"])
        raise ConfigError(key, name, f"its files lack {len(missing)} weights of a classifier, e.g. {missing[0]}")
    return model.eval()


def clamp_to_positions(model: PreTrainedModel, limit: int) -> int:
    """Return `limit`, or the number of positions of the model if that is smaller."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(limit, positions) if isinstance(positions, int) and positions > 0 else limit


def score_padded(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Return the scores [N] in float32 of rows padded on the right."""
    pad_id = _pad_id(model)
    token_ids = torch.full((len(rows), max(map(len, rows))), 0 if pad_id is None else pad_id)  # [N, T]
    mask = torch.zeros_like(token_ids)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    token_ids, mask = token_ids.to(model.device), mask.to(model.device)
    head = _token_head(model)
    if head is None:
        return model(input_ids=token_ids, attention_mask=mask).logits[:, 0].float()
    hidden = model.base_model(input_ids=token_ids, attention_mask=mask, use_cache=False).last_hidden_state
    last = torch.tensor([_pooled_index(row, pad_id) for row in rows], device=model.device)
    return head(hidden[torch.arange(len(rows), device=model.device), last])[:, 0].float()


def score_packed(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Return the scores [N] in float32 of rows concatenated into one, with positions restarting at 0 in each.

    Causal models of transformers infer sequence boundaries from such positions; `check_layout_exact` detects one that
    does not.
    """
    head = _token_head(model)
    if head is None:
        return torch.full((len(rows),), float("nan"))
    token_ids = torch.tensor([[token_id for row in rows for token_id in row]], device=model.device)  # [1, T]
    positions = torch.tensor([[index for row in rows for index in range(len(row))]], device=model.device)
    hidden = model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
    indices, start = [], 0
    for row in rows:
        indices.append(start + _pooled_index(row, _pad_id(model)))
        start += len(row)
    return head(hidden[0, indices])[:, 0].float()


@torch.inference_mode()
def check_layout_exact(key: str, value: object, model: PreTrainedModel, layout: Layout) -> None:
    """Raise ConfigError if rows that share a forward pass of this layout score differently from each of them alone."""
    rows = [[index % (model.config.get_text_config().vocab_size - 1) + 1 for index in range(n)] for n in PROBE_LENGTHS]
    alone = torch.cat([model(torch.tensor([row], device=model.device)).logits[0, :1].float() for row in rows])
    difference = ((layout(model, rows) - alone).abs() / alone.abs().clamp(min=1)).max().item()
    if not difference <= TOLERANCE[model.dtype]:
        problem = (
            f"{type(model).__name__} scores a conversation differently when batched with others, by {difference:.2g}"
        )
        raise ConfigError(key, value, problem)


def iter_micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Yield the indices of all rows, at most `size` at a time, grouped by length."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _load_single_label_config(key: str, name: str, fresh_head: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name, **({"num_labels": 1} if fresh_head else {}))
    except (OSError, ValueError, KeyError) as error:
        problem = f"no Hugging Face model found ({str(error).splitlines()[0]})"
        raise ConfigError(key, name, problem) from error
    if config.num_labels != 1:
        raise ConfigError(key, name, f"a reward model has 1 label, this one has {config.num_labels}")
    return config


def _token_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head of a classifier that scores the last token; None for a model that pools differently."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) and not model.config.is_encoder_decoder else None


def _pad_id(model: PreTrainedModel) -> int | None:
    return model.config.get_text_config().pad_token_id


def _pooled_index(row: Row, pad_id: int | None) -> int:
    """Return the index that transformers pools: of the last token that is not padding, or 0."""
    indices = [index for index, token_id in enumerate(row) if token_id != pad_id]
    return indices[-1] if indices else 0
