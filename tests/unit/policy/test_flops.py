from transformers import Qwen2Config

from nemo_rl.policy.base_rank import matmul_parameters, train_flops
from tests.unit.policy.tiny import MODELS


def test_operations_of_one_sequence() -> None:
    config = Qwen2Config(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    assert train_flops(1000, config, [10]) == 6 * 1000 * 10 + 6 * 2 * 8 * 100


def test_embedding_counts_only_where_it_is_the_output_head_too() -> None:
    qwen2, llama = MODELS["qwen2"](), MODELS["llama"]()
    assert matmul_parameters(qwen2) == sum(p.numel() for p in qwen2.parameters())
    assert matmul_parameters(llama) == sum(p.numel() for p in llama.parameters()) - 37 * 32
