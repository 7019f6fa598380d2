"""A tiny model that answers any chat prompt with one of a few texts, of known probabilities."""

from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.templates import byte_tokenizer

HIDDEN_SIZE = 512  # above the vocabulary's size: each token has a dimension of its own
NEVER = -30.0  # logit of what the model does not say


def save_answering_model(
    directory: Path, answers: Mapping[str, float], *, max_length: int, template: str = "chatml"
) -> None:
    """Save a model with its tokenizer in `directory`; `answers` has the probability of each text.

    A text is one token. Layers add nothing, so the next token depends on the last one alone: the line break that ends
    a prompt is followed by an answer, and anything else by the end of the turn.
    """
    tokenizer = byte_tokenizer(template)
    added: Any = [AddedToken(text, normalized=False) for text in answers]
    tokenizer.add_tokens(added)
    tokenizer.pad_token = tokenizer.eos_token
    end: Any = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN_SIZE,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    logits = torch.full((len(tokenizer), len(tokenizer)), NEVER)  # [last token, next token]
    logits[:, end] = 0.0
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False)
    logits[line_break, end] = NEVER
    for text, probability in answers.items():
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        logits[line_break, token] = log(probability)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight[:, : len(tokenizer)] = torch.eye(len(tokenizer))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[:, : len(tokenizer)] = logits.T / HIDDEN_SIZE**0.5  # the norm's scale of one dimension
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
