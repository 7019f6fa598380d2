"""NeMo-RL's metrics of a batch, for environments written for it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def calculate_pass_rate_per_prompt(prompts: "torch.Tensor", is_correct: "torch.Tensor") -> float:
    """Return the share of distinct prompts with a correct answer.

    Args:
        prompts: [B, T], equal rows are one prompt.
        is_correct: [B], above 0 where the answer is correct.
    """
    rows = [tuple(row) for row in prompts.tolist()]
    solved = {row for row, correct in zip(rows, is_correct.tolist(), strict=True) if correct > 0}
    return len(solved) / len(set(rows))
