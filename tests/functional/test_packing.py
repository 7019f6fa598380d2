"""The quickstart with its samples packed, through the command line."""

from pathlib import Path

import pytest

from tests.functional.cli import run_grpo

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]  # three whole runs

SMALL = (
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=4",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    "checkpointing.enabled=false",
)


PACKED = ("policy.sequence_packing.enabled=true",)
WAYS = {"padded": (), "packed": PACKED, "sharing": (*PACKED, "policy.sequence_packing.share_prefixes=true")}


def test_packed_samples_train_with_the_losses_of_padded_ones(tmp_path: Path) -> None:
    losses = []
    for name, options in WAYS.items():
        run = run_grpo(tmp_path / name, *SMALL, *options)
        assert run.returncode == 0, run.stdout + run.stderr
        metrics = run.metrics()
        losses.append(
            [value for step in (1, 2, 3) for value in (metrics[step]["train/loss"], metrics[step]["train/grad_norm"])]
        )
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5, rel=1e-4)
