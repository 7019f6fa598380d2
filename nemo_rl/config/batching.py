"""`policy.sequence_packing` and `policy.dynamic_batching`: micro-batches bounded by tokens instead of samples."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.section import Section

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class _TokenBudgetConfig(Section):
    enabled: bool = False
    # Tokens of one micro-batch; None: policy.max_total_sequence_length times its samples where samples are counted.
    train_mb_tokens: int | None = Field(default=None, gt=0)
    logprob_mb_tokens: int | None = Field(default=None, gt=0)


class SequencePackingConfig(_TokenBudgetConfig):
    """Samples lie one behind the other in a micro-batch, without padding."""

    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"


class DynamicBatchingConfig(_TokenBudgetConfig):
    """Samples of like length are padded to the longest, as many as the budget holds."""

    sequence_length_round: int = Field(default=64, gt=0)  # the padded length is a multiple of it
