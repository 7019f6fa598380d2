"""A collection of real parts and a tiny model: what it writes, what it refuses, how it goes on and how it ends."""

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_rl.collect.tasks import read_tasks
from nemo_rl.commands import run_command
from nemo_rl.config.loading import load_collect_config
from nemo_rl.distributed.machine import unused_port
from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.launch import collect, commands
from nemo_rl.launch.collect import CollectionResult, model_digest, run_collection
from tests.fakes.gym_stack import row_of, spell_and_play
from tests.unit.launch.scoring import Closing


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, process_state: None) -> None:
    monkeypatch.setattr(collect, "open_console", lambda level: Console(file=io.StringIO()))


@pytest.fixture
def path(tmp_path: Path, model_folder: Path) -> Path:
    """A recipe over six letters, two rollouts each."""
    rows = [{"input": letter, "output": letter} for letter in "abcdef"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
collect: {{output_dir: {tmp_path / "out"}, num_repeats: 2, concurrency: 4}}
policy:
  model_name: {model_folder}
  precision: float32
  device: cpu
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 4}}
server: {{backend: hf}}
data: {{input: {{dataset_name: jsonl, data_path: {tmp_path / "data.jsonl"}, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{progress: false}}
"""
    )
    return path


def run(path: Path, *overrides: str) -> CollectionResult:
    return asyncio.run(run_collection(load_collect_config(path, overrides)))


def rows(path: Path, name: str = "rollouts-rs0.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path.parent / "out" / name).read_text().splitlines()]


def test_a_collection_holds_every_rollout_and_the_whole_input(path: Path) -> None:
    collected = run(path, "collect.seeds=0,3")
    assert (collected.num_rollouts, collected.num_finished, collected.num_new, collected.is_complete) == (
        24,
        24,
        24,
        True,
    )
    found = rows(path)
    assert [(row["task_index"], row["rollout_index"]) for row in found] == [(t, r) for t in range(6) for r in range(2)]
    assert found[2]["messages"][0]["content"] == "b"
    assert [task.row for task in read_tasks(path.parent / "out")] == [{"input": c, "output": c} for c in "abcdef"]
    assert [task.prompt_id for task in read_tasks(path.parent / "out")] == [row["prompt_id"] for row in found[::2]]
    other = rows(path, "rollouts-rs3.jsonl")
    assert [row["messages"] for row in other] != [row["messages"] for row in found]


def test_what_is_whole_starts_no_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(path)
    monkeypatch.setattr(collect, "open_engine", None)
    again = run(path, "collect.concurrency=1")
    assert (again.num_finished, again.num_new, again.mean_reward) == (12, 0, None)


def test_another_configuration_is_refused_with_each_difference(path: Path) -> None:
    run(path, "collect.limit=1")
    with pytest.raises(ConfigError, match=r"temperature: was 1\.0, is 0\.5") as error:
        run(path, "collect.limit=1", "policy.generation.temperature=0.5", "policy.generation.timeout_s=5")
    assert "timeout_s" not in str(error.value)
    with pytest.raises(ConfigError, match="holds a collection of other data: task 1 differs"):
        run(path, "collect.limit=2")


def test_a_model_is_told_by_its_weights(model_folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in model_folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert model_digest(copied) == model_digest(model_folder)
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert model_digest(copied) != model_digest(model_folder)
    assert model_digest(tmp_path / "a-name-on-a-hub") is None


def test_rollouts_that_fail_each_time_are_told_and_make_the_command_fail(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(path), "env.letters.type=tests.unit.launch.scoring:raising", "collect.max_attempts=2"]
    assert run_command(commands.COLLECT, arguments) == 1
    out = capsys.readouterr().out
    assert "Rollouts    0 of 12" in out
    assert "Failed      12 each time" in out
    assert [row["attempt"] for row in rows(path, "rollouts-rs0_failures.jsonl")] == [1] * 12 + [2] * 12
    assert (path.parent / "out" / "rollouts-rs0.jsonl.done").exists()


def test_something_broken_stops_before_all_attempts_are_spent(path: Path) -> None:
    with pytest.raises(RolloutError, match="3 rollouts in a row failed"):
        run(path, "env.letters.type=tests.unit.launch.scoring:raising", "collect.max_failures_in_a_row=3")
    assert len(rows(path, "rollouts-rs0_failures.jsonl")) == 3


def test_the_command_tells_what_there_is_and_a_bad_configuration_exits_with_2(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(commands.COLLECT, ["--config", str(path), "collect.limit=2", "collect.chunk=1/2"]) == 0
    out = capsys.readouterr().out
    assert f"Rollouts    2 of 2 in {path.parent / 'out'}" in out
    assert "nemo-rl merge" in out
    assert [row["task_index"] for row in rows(path, "rollouts-rs0-chunk1.jsonl")] == [1, 1]
    assert run_command(commands.COLLECT, ["--config", str(path), "collect.limits=2"]) == 2
    assert "did you mean collect.limit?" in capsys.readouterr().err
    assert run_command(commands.COLLECT, ["--config", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("collect:\n  output_dir:")


def test_a_signal_ends_it_cleanly_with_what_is_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = collect.collect_rollouts

    async def interrupted(stores: Any, *arguments: Any, on_rollout: Any, **options: Any) -> None:
        def after(trajectory: Any) -> None:
            on_rollout(trajectory)
            if stores[0].num_finished == 4:
                os.kill(os.getpid(), signal.SIGINT)

        await real(stores, *arguments, on_rollout=after, **options)
        await asyncio.sleep(60)

    monkeypatch.setattr(collect, "collect_rollouts", interrupted)
    assert run_command(commands.COLLECT, ["--config", str(path), "collect.concurrency=2"]) == 130
    assert "Continue    with the same command" in capsys.readouterr().out
    monkeypatch.setattr(collect, "collect_rollouts", real)
    assert run_command(commands.COLLECT, ["--config", str(path)]) == 0
    assert len({(row["task_index"], row["rollout_index"]) for row in rows(path)}) == len(rows(path)) == 12


def test_what_was_opened_is_closed(path: Path) -> None:
    Closing.closed.clear()
    run(path, "env.letters.type=tests.unit.launch.scoring:Closing", "collect.limit=1", "collect.max_attempts=1")
    assert Closing.closed == ["closed"]


def test_agents_are_collected_through_the_gateway(path: Path) -> None:
    agent = "{type: agent, function: 'tests.unit.launch.test_dependencies:ask', scored_by: letters}"
    collected = run(
        path,
        f"++env.asker={agent}",
        "data.input.env_name=asker",
        "gateway.tool_parser=null",
        "collect.write_token_ids=true",
    )
    assert (collected.num_finished, collected.num_given_up) == (12, 0)
    for row in rows(path):
        assert row["task_name"] == "asker"
        assert row["num_generated_tokens"] == len(row["messages"][-1]["token_ids"]) > 0


def test_rows_of_nemo_gym_are_collected_with_their_tokens(path: Path, tmp_path: Path) -> None:
    gym_rows = [row_of(letter, agent) for letter, agent in zip("abcd", ("spell", "play") * 2, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gym_rows))

    async def main() -> CollectionResult:
        port = unused_port()
        stack = spell_and_play(port)
        async with stack:
            overrides = (
                f"++env.gym={{type: nemo_gym, head_url: '{stack.head_url}', start_timeout_s: 60}}",
                f"data.input={{dataset_name: nemo_gym, data_path: {tmp_path / 'rows.jsonl'}, env_name: gym}}",
                f"++gateway={{port: {port}, tool_parser: null}}",
                "policy.max_total_sequence_length=64",
            )
            return await run_collection(load_collect_config(path, overrides))

    collected = asyncio.run(main())
    assert (collected.num_finished, collected.num_given_up) == (8, 0)
    assert all(row["rewards"].keys() == {"gym"} and row["num_generated_tokens"] for row in rows(path))
    assert [task.row for task in read_tasks(path.parent / "out")] == gym_rows


def test_an_evaluation_measures_two_models_and_compares_them(
    path: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "eval.yaml"
    text = path.read_text()
    recipe.write_text(
        text.replace(text.splitlines()[1], f"eval: {{output_dir: {tmp_path / 'evals'}, num_tests_per_prompt: 2}}")
    )
    other = tmp_path / "other"
    other.symlink_to(model_folder)
    config = commands.EVAL_JOB.load(recipe, [f"eval.baseline={other}"])
    assert commands.EVAL_JOB.run(config, "") == 0
    out = capsys.readouterr().out
    assert out.count("pass@2 ") >= 2
    assert f"of {model_folder} over 6 tasks" in out
    assert f"of {other} over 6 tasks" in out
    folders = sorted(path.name for path in (tmp_path / "evals").iterdir())
    assert len(folders) == 2
