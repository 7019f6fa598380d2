"""Agents on the official packages, one an API, trained through the command line: real vLLM, the quickstart's model."""

import json
from pathlib import Path

import pytest

from tests.functional.cli import Run, run_grpo
from tests.support.quick import quick

pytestmark = pytest.mark.timeout(600)  # the first run also makes the quickstart's model

AGENT = (
    "++env.asker.type=agent",
    "++env.asker.function=examples.agents.single_turn:ask",
    "++env.asker.scored_by=reasoning_gym",
    "data.default.env_name=asker",
)
SMALL = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "++policy.optimizer.kwargs.lr=1e-4",
    "grpo.max_val_samples=16",
    "grpo.val_period=2",
    "checkpointing.enabled=false",
    "weight_sync.verify=true",
)


ASKERS = ("single_turn:ask", "other_apis:ask_with_responses", "other_apis:ask_with_messages")

MISTAKES = [
    (("env.asker.function=examples.agents.single_turn:aks",), "did you mean ask?"),
    (("gateway.tool_parser=hermess",), "hermes"),
    (("env.asker.scored_by=asker",), "env.asker.scored_by"),
]


@pytest.fixture(scope="module", params=quick(ASKERS, ["other_apis:ask_with_messages"]))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    function = f"++env.asker.function=examples.agents.{request.param}"
    run = run_grpo(tmp_path_factory.mktemp("logs"), *SMALL, *AGENT, function)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_an_agent_that_knows_only_a_base_url_is_trained_and_validated(run: Run) -> None:
    metrics = run.metrics()
    assert [step for step in metrics if "train/loss" in metrics[step]] == [1, 2]
    for step in (1, 2):
        assert metrics[step]["train/num_rollouts"] == 4 * 8
        assert metrics[step]["train/failures/agent"] == metrics[step]["train/failures/infra"] == 0
    assert {"validation/accuracy", "validation/greedy_accuracy"} <= metrics[2].keys()
    assert metrics[2]["validation/num_failed"] == 0


def test_the_policy_agrees_with_the_engine_about_every_token_that_the_agent_sampled(run: Run) -> None:
    for step, metrics in run.metrics().items():
        if "train/loss" in metrics:
            assert metrics["train/max_logprob_error"] <= 1e-4, step


def test_rollouts_of_an_agent_are_written_with_the_scorers_reward(run: Run) -> None:
    assert run.directory is not None
    rows = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4 * 8
    assert {row["task_name"] for row in rows} == {"asker"}
    assert all(row["rewards"].keys() == {"reasoning_gym"} for row in rows)
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)


@pytest.mark.slow  # a process each; tests/unit/docs/test_errors.py loads the first one's recipe
@pytest.mark.parametrize(("overrides", "expected"), MISTAKES)
def test_a_mistake_about_an_agent_ends_before_a_model_loads(
    overrides: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    run = run_grpo(tmp_path, *AGENT, *overrides)
    assert run.returncode == 2, run.stderr
    assert expected in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow  # as the first run, by another package
def test_an_agent_of_an_existing_framework_is_trained_unchanged(tmp_path: Path) -> None:
    function = "++env.asker.function=examples.agents.with_pydantic_ai:ask"
    run = run_grpo(tmp_path, *SMALL, *AGENT, function, "grpo.max_num_steps=1", "grpo.val_period=0")
    assert run.returncode == 0, run.stdout + run.stderr
    step = run.metrics()[1]
    assert step["train/num_rollouts"] == 4 * 8
    assert step["train/failures/agent"] == step["train/failures/infra"] == 0
    assert step["train/max_logprob_error"] <= 1e-4
