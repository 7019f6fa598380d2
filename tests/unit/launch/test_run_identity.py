"""What decides a collection's samples is in its identity."""

from pathlib import Path
from typing import Any

from nemo_rl.collect.tasks import TasksSummary
from nemo_rl.config.loading import load_collect_config
from nemo_rl.launch.collect import run_identity

RECIPE = """
collect: {output_dir: out}
policy: {model_name: m, max_total_sequence_length: 32, generation: {max_new_tokens: 4}}
server: {address: "http://127.0.0.1:8000"}
data: {input: {dataset_name: reasoning_gym, task: spell_backward, env_name: letters}}
env: {letters: {type: "tests.unit.launch.scoring:length"}}
"""


def identity(directory: Path, served_model: str, *overrides: str) -> dict[str, Any]:
    (directory / "recipe.yaml").write_text(RECIPE)
    config = load_collect_config(directory / "recipe.yaml", overrides)
    return run_identity(config, TasksSummary(1, "digest"), "m", engine="chat", served_model=served_model)


def test_a_server_that_chooses_its_model_is_known_by_it(tmp_path: Path) -> None:
    assert identity(tmp_path, "step_50") != identity(tmp_path, "step_100")
    assert identity(tmp_path, "step_50") == identity(tmp_path, "step_50", "server.model=step_50")


def test_where_a_server_stands_is_no_part_of_it(tmp_path: Path) -> None:
    moved = identity(tmp_path, "m", "server.address='http://127.0.0.1:9000'", "collect.concurrency=3")
    assert moved == identity(tmp_path, "m")


def test_the_agent_of_rows_that_name_none_is_part_of_it(tmp_path: Path) -> None:
    first, second = (identity(tmp_path, "m", f"data.input.agent_name={name}") for name in "ab")
    assert first != second
    assert first["data"] == second["data"]  # two agents are compared task by task
