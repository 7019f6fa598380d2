"""A Hugging Face sequence classifier of one label: loading it, and its scores of many rows of tokens at once.

Scores are those of a plain forward pass of each row alone, whatever stands beside it. N rows, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from nemo_rl.errors import ConfigError

Row: TypeAlias = Sequence[int]  # token ids
Layout: TypeAlias = Callable[[PreTrainedModel, Sequence[Row]], torch.Tensor]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of a score, relative to 1 or to the score itself
PROBE_LENGTHS = (5, 2, 9)  # tokens


def load_classifier(
    key: str, name: str, *, precision: Literal["float32", "bfloat16"] = "float32", fresh_head: bool = False
) -> PreTrainedModel:
    """The classifier of the Hugging Face name or folder `name`, on the CPU, without dropout.

    `fresh_head` gives any model a new head of one label, to be trained.

    Raises:
        ConfigError: under `key`: no such model, no classifier of one label, or files that lack weights.
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
    """`limit`, or the positions that the model has where they are fewer."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(limit, positions) if isinstance(positions, int) and positions > 0 else limit


def score_padded(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Scores [N] in float32: one row each, padded on the right."""
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
    """Scores [N] in float32: all rows behind each other in one, positions counted from 0 in each.

    A causal model of transformers reads sequence borders from such positions; `check_layout_exact`
    finds one that does not.
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
    """Raise ConfigError where rows in one forward pass of this layout have other scores than each of them alone."""
    rows = [[index % (model.config.get_text_config().vocab_size - 1) + 1 for index in range(n)] for n in PROBE_LENGTHS]
    alone = torch.cat([model(torch.tensor([row], device=model.device)).logits[0, :1].float() for row in rows])
    difference = ((layout(model, rows) - alone).abs() / alone.abs().clamp(min=1)).max().item()
    if not difference <= TOLERANCE[model.dtype]:
        problem = f"{type(model).__name__} scores a conversation otherwise beside others, by {difference:.2g}"
        raise ConfigError(key, value, problem)


def iter_micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Places of all rows, at most `size` at a time, those of like length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _load_single_label_config(key: str, name: str, fresh_head: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name, **({"num_labels": 1} if fresh_head else {}))
    except (OSError, ValueError, KeyError) as error:
        problem = f"no Hugging Face model can be read there ({str(error).splitlines()[0]})"
        raise ConfigError(key, name, problem) from error
    if config.num_labels != 1:
        raise ConfigError(key, name, f"a reward model has 1 label, this one has {config.num_labels}")
    return config


def _token_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head of a classifier that scores the last token; None: it pools in a way of its own."""
    head = getattr(model, "score", None)
    return head if isinstance(head, nn.Linear) and not model.config.is_encoder_decoder else None


def _pad_id(model: PreTrainedModel) -> int | None:
    return model.config.get_text_config().pad_token_id


def _pooled_index(row: Row, pad_id: int | None) -> int:
    """As transformers has it: the last token that is not padding, the last one where the model knows no padding."""
    indices = [index for index, token_id in enumerate(row) if token_id != pad_id]
    return indices[-1] if indices else 0
