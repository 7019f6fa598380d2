"""What a step of training costs, in floating-point operations."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedConfig


def matmul_parameters(model: nn.Module) -> int:
    """Weights that every token is multiplied with: all but an embedding table that is only looked up.

    A frozen one counts as two thirds: of its 6 operations a token it has no 2 for a gradient of its own.
    """
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tables.pop(id(module.weight), None)  # tied: the output head multiplies with it
    counted = (p for p in model.parameters() if id(p) not in tables)
    return round(sum(p.numel() * (1 if p.requires_grad else 2 / 3) for p in counted))


def train_flops(num_parameters: int, config: PreTrainedConfig, lengths: Iterable[int]) -> float:
    """Operations of one forward and backward over sequences of these lengths, causal attention included.

    6 N a token for the weights (2 forward, 4 backward) and 6 L H T^2 a sequence for attention, with L layers and H the
    width of all heads together: forward 2 T^2 H for the scores and 2 T^2 H for the values, half of both under a causal
    mask, three times that with the backward. Recomputation is not counted; nor is it known which of a mixture's
    experts were used, so there the number is an upper bound.

    Example: N = 1000, L = 2, H = 8, one sequence of 10 tokens: 6*1000*10 + 6*2*8*100 = 69600.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    width = num_heads * (getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    lengths = list(lengths)
    attention = 6 * text.num_hidden_layers * width * sum(n * n for n in lengths)
    return float(6 * num_parameters * sum(lengths) + attention)
