"""The quickstart's network: a Llama small enough to train on two CPU cores."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from nemo_rl.quickstart.tokenizer import PADDING, TURN_END


def make_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LlamaForCausalLM:
    """Fresh weights, 0.7M of them, float32; a function of the seed alone.

    Not a Qwen2: transformers 5.19 gives a folder of that model type the Qwen2 tokenizer, whatever the folder holds.
    """
    vocabulary = tokenizer.get_vocab()
    config = LlamaConfig(
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
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()
