"""The quickstart's networks: Llamas small enough to train on two CPU cores, one that writes and one that scores."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from nemo_rl.quickstart.recipes import Recipe, student


def make_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> LlamaForCausalLM:
    """Fresh weights, 0.7M of the student's, float32; a function of the recipe's sizes and seed.

    Not a Qwen2: transformers 5.19 gives a folder of that model type the Qwen2 tokenizer, whatever the folder holds.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(_config(tokenizer, recipe)).float()


def make_classifier(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForSequenceClassification:
    """The student's body with a head of one label, for a reward model; a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(_config(tokenizer, student(seed), num_labels=1)).float()


def _config(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, **options: int) -> LlamaConfig:
    vocabulary = tokenizer.get_vocab()
    return LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // 32,
        num_key_value_heads=recipe.hidden_size // 64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[str(tokenizer.eos_token)],
        pad_token_id=vocabulary[str(tokenizer.pad_token)],
        **options,  # pyright: ignore[reportArgumentType]
    )
