"""A mixture of experts through the command line: real vLLM and FSDP2 in bfloat16, on the routes of the engine."""

from pathlib import Path

import pytest

from nemo_rl.quickstart.models import experts, make_model, make_tokenizer
from tests.functional.cli import ROOT, Run, run_grpo
from tests.support.metric_names import find_undocumented

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train the network of moe.yaml before its own training, packed, with layers recomputed."""
    directory: Path = tmp_path_factory.mktemp("experts")
    tokenizer = make_tokenizer()
    make_model(tokenizer, experts(0)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    run = run_grpo(
        tmp_path_factory.mktemp("logs"),
        "--config",
        str(ROOT / "examples/configs/moe.yaml"),
        f"policy.model_name={directory}",
        "policy.sequence_packing.enabled=true",
        "++policy.dtensor_cfg.activation_checkpointing=true",
        "policy.train_micro_batch_size=8",
        "grpo.num_prompts_per_step=4",
        "grpo.max_num_steps=2",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_every_token_goes_to_the_experts_of_the_engine(run: Run) -> None:
    metrics = run.metrics()
    assert [step for step in metrics if "train/loss" in metrics[step]] == [1, 2]
    for step in (1, 2):
        assert metrics[step]["train/moe/missing_routes"] == 0
        assert metrics[step]["train/moe/other_experts"] == 0
        assert metrics[step]["train/max_logprob_error"] < 0.1
        assert 0 < metrics[step]["train/moe/router_entropy"] < 2.08  # log 8


def test_every_logged_metric_is_documented(run: Run) -> None:
    assert not find_undocumented({name for metrics in run.metrics().values() for name in metrics})
