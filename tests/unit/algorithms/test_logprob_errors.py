import math

import pytest

from nemo_rl import batch as keys
from nemo_rl.algorithms.stages import mask_logprob_errors
from tests.unit.algorithms.batches import make_batch


def test_sequences_above_the_threshold_lose_their_gradient() -> None:
    batch = make_batch(
        [[0, 1, 1], [0, 1, 1], [0, 1, 0]],
        rewards=[1.0, 0.0, 1.0],
        prev_logprobs=[[9.0, -1.0, -1.0], [0.0, -1.0, -1.0], [0.0, -1.0, 9.0]],
        generation_logprobs=[[0.0, -1.5, -0.9], [0.0, -1.1, -1.0], [0.0, -1.2, 0.0]],
    )
    metrics = mask_logprob_errors(batch, math.exp(0.25))
    assert batch[keys.SAMPLE_MASK].tolist() == [0.0, 1.0, 1.0]
    assert metrics == pytest.approx(
        {
            "max_seq_mult_prob_error": math.exp(0.3),
            "mean_seq_mult_prob_error": (math.exp(0.3) + math.exp(0.05) + math.exp(0.2)) / 3,
            "max_seq_mult_prob_error_after_mask": math.exp(0.2),
            "num_masked_seqs_by_logprob_error": 1.0,
            "masked_correct_pct": 1.0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_sequence_with_a_logprob_that_is_no_number_is_masked(logprob: float) -> None:
    batch = make_batch([[0, 1], [0, 1]], prev_logprobs=[[0.0, 0.0]] * 2, generation_logprobs=[[0, 0], [0, logprob]])
    metrics = mask_logprob_errors(batch, 2.0)
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 0.0]
    assert all(math.isfinite(value) for value in metrics.values())


def test_samples_without_gradient_are_not_counted() -> None:
    batch = make_batch([[0, 1]], prev_logprobs=[[0.0, -5.0]], sample_mask=[0.0])
    metrics = mask_logprob_errors(batch, 2.0)
    assert metrics["num_masked_seqs_by_logprob_error"] == 0
    assert metrics["max_seq_mult_prob_error"] == 1
