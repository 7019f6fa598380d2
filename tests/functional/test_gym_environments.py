"""Twelve environments of NeMo Gym 0.7 in one training run: single answers, tools, games and scripted users.

The model says one of a few texts, whatever it is asked: answers, moves, calls of each tool. So every environment gets
right, wrong and misplaced replies, and conversations of many lengths.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.distributed.machine import unused_port, unused_ports
from tests.contracts.real_gym import VERSIONS, example_rows, gym_environment, real_gym
from tests.functional import cli
from tests.functional.cli import run_command_line
from tests.functional.recorded_tokens import sampled_calls, trained_calls
from tests.support.answering_model import save_answering_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS, GENERATIONS = 3, 4
MAX_LENGTH = 16_384  # bytes are tokens
MAX_TEXT = 1_500  # characters of a row's text, so that prompts stay short
MAX_LOGPROB_ERROR = 1e-4
DEADLINE_S = 1500.0
SCRIPT = Path(__file__).with_name("recorded_grpo.py")
MODEL_SERVER = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
AGENTS = {  # by environment
    "mcqa": "mcqa_simple_agent",
    "gpqa_diamond": "gpqa_diamond_simple_agent",
    "reasoning_gym": "reasoning_gym_simple_agent",
    "string_match": "string_match_simple_agent",
    "spartqa": "spartqa_simple_agent",
    "example_single_tool_call": "example_single_tool_call_simple_agent",
    "example_multi_step": "example_multi_step_simple_agent",
    "example_tool_call_multireward": "example_tool_call_multireward_simple_agent",
    "example_session_state_mgmt": "example_session_state_mgmt_simple_agent",
    "xlam_fc": "xlam_fc_simple_agent",
    "blackjack": "blackjack_gymnasium_agent",
    "example_multi_turn_gymnasium": "example_multi_turn_gymnasium_agent",
}
WITH_TOOLS = tuple(AGENTS)[5:10]
MULTI_TURN = tuple(AGENTS)[5:]  # tool results, and what a game or a scripted user says


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "Answer: \\boxed{C}\nFinal answer: both of them": 0.18,
    "Answer: \\boxed{Paris}": 0.12,
    "<action>hit</action>": 0.12,
    "<action>stand</action>": 0.06,
    call("get_weather", city="San Francisco"): 0.16,
    call("increment_counter", count=3): 0.12,
    call("get_counter_value"): 0.04,
    call("get_synonym_value", synonym="Arid"): 0.05,
    call("extract_synonym_values", synonym_values=[407]): 0.05,
    call("live_giveaways_by_type", type="beta"): 0.1,
}


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[str, int]]:
    """Return the address of the head server, and the port where its model server looks for the policy."""
    gym, port = gym_environment(VERSIONS[1]), unused_port()
    paths = [f"resources_servers/{name}/configs/{name}.yaml" for name in AGENTS]
    ports = unused_ports(3 * len(AGENTS) + 1)
    settings: dict[str, Any] = {"environment": gym, "config_paths": [*paths, MODEL_SERVER], "ports": ports}
    with real_gym(f"http://127.0.0.1:{port}/v1", **settings) as head_url:
        yield head_url, port


def write_rows(file: Path) -> None:
    """Write one row of each environment per step, as Gym ships them, with long texts cut."""
    gym = gym_environment(VERSIONS[1])
    rows = []
    for step in range(NUM_STEPS):
        for name, agent in AGENTS.items():
            row = example_rows(name, gym)[step]
            for item in row["responses_create_params"]["input"]:
                if isinstance(item["content"], str):
                    item["content"] = item["content"][:MAX_TEXT]
            rows.append(row | {"agent_ref": {"type": "responses_api_agents", "name": agent}})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(directory: Path, head_url: str, port: int) -> Path:
    save_answering_model(directory / "model", ANSWERS, max_length=MAX_LENGTH, template="qwen3")
    write_rows(directory / "rows.jsonl")
    rows = len(AGENTS) * GENERATIONS
    config = {
        "defaults": str(cli.ROOT / "examples" / "configs" / "quickstart.yaml"),
        "grpo": {"num_prompts_per_step": len(AGENTS), "num_generations_per_prompt": GENERATIONS}
        | {"max_num_steps": NUM_STEPS, "val_period": 0, "val_at_start": False, "val_at_end": False},
        "policy": {"model_name": str(directory / "model"), "max_total_sequence_length": MAX_LENGTH}
        | {"train_global_batch_size": rows, "train_micro_batch_size": 4}
        | {"generation": {"max_new_tokens": 64, "vllm_cfg": {"max_num_seqs": 16}}},
        "data": {
            "train": {"dataset_name": "nemo_gym", "data_path": str(directory / "rows.jsonl")}
            | {"task": None, "task_kwargs": {}, "size": None},
            "validation": None,
            "default": {"env_name": None},
            "shuffle": False,
        },
        "env": {"nemo_gym": {"head_url": head_url}},
        "gateway": {"port": port},
        "rollout": {"write_token_ids": True},
        "weight_sync": {"verify": True},
        "checkpointing": {"enabled": False, "metric_name": None},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_twelve_environments_train_in_one_run_with_every_token_once(
    stack: tuple[str, int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record = tmp_path / "record.jsonl"
    config = f"--config={write_recipe(tmp_path, *stack)}"
    run = run_command_line(SCRIPT, tmp_path / "logs", config, deadline_s=DEADLINE_S, RECORD=str(record))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert run.directory is not None
    rows = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS * len(AGENTS) * GENERATIONS
    assert [row["failure"] for row in rows if row["failure"]] == []

    trained = trained_calls(rows)
    assert trained == sampled_calls(record)
    errors = [run.metrics()[step]["train/max_logprob_error"] for step in range(1, NUM_STEPS + 1)]
    assert max(errors) <= MAX_LOGPROB_ERROR

    check_environments(rows)
    for what, value in (("rollouts", len(rows)), ("calls", trained.total()), ("max_logprob_error", max(errors))):
        record_property(what, value)
    record_property("turns", dict(Counter(row["num_turns"] for row in rows)))


def check_environments(rows: list[dict[str, Any]]) -> None:
    """Check that tools and games were played, and rewards whose answer can be told here."""
    by_agent: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_agent[row["env"]].append(row)
    assert {agent: len(each) for agent, each in by_agent.items()} == dict.fromkeys(
        AGENTS.values(), NUM_STEPS * GENERATIONS
    )
    for name in WITH_TOOLS:
        assert any(message["role"] == "tool" for row in by_agent[AGENTS[name]] for message in row["messages"]), name
    for name in MULTI_TURN:
        assert max(row["num_turns"] for row in by_agent[AGENTS[name]]) > 1, name
    for name in ("mcqa", "gpqa_diamond", "string_match"):
        expected = [row["expected_answer"] for row in example_rows(name, gym_environment(VERSIONS[1]))[:NUM_STEPS]]
        for row in by_agent[AGENTS[name]]:
            answer = row["env_state"]["row"]["expected_answer"]
            assert answer in expected
            assert row["reward"] == float(f"\\boxed{{{answer}}}" in row["messages"][-1]["content"])
