"""The quickstart's networks: Llamas small enough to train on two CPU cores, one that writes and one that scores."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from nemo_rl.quickstart.tokenizer import PADDING, TURN_END


def make_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForCausalLM:
    """Fresh weights, 0.7M of them, float32; a function of the seed alone.

    Not a Qwen2: transformers 5.19 gives a folder of that model type the Qwen2 tokenizer, whatever the folder holds.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(_config(tokenizer)).float()


def make_classifier(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForSequenceClassification:
    """The same body with a head of one label, for a reward model; a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(_config(tokenizer, num_labels=1)).float()


def _config(tokenizer: PreTrainedTokenizerBase, **options: int) -> LlamaConfig:
    vocabulary = tokenizer.get_vocab()
    return LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[TURN_END],
        pad_token_id=vocabulary[PADDING],
        **options,  # pyright: ignore[reportArgumentType]
    )
