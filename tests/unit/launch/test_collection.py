"""Collections of real parts and a tiny model: output, refusals, resuming, identity; rescoring of stored rollouts."""

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_rl.collect.profile import profile
from nemo_rl.collect.profile_command import PROFILE
from nemo_rl.collect.shards import TasksSummary, read_tasks
from nemo_rl.command_line import run_command
from nemo_rl.config.loading import load_collect_config, load_config
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.distributed.machine import unused_port
from nemo_rl.errors import ConfigError, DataError, RolloutError
from nemo_rl.experience.rescoring import rescore_rollouts
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.scoring import Scoring
from nemo_rl.launch import collection, recipe_commands
from nemo_rl.launch.collection import CollectionResult, run_collection
from nemo_rl.launch.collection_identity import model_digest, run_identity
from nemo_rl.launch.rescoring import rescore_file
from nemo_rl.launch.resolved_run import load_prompts
from nemo_rl.types import Failure, FailureClass, Message, Prompt, StopReason, TokenizedMessage, Trajectory
from tests.fakes.gym_stack import row_of, spell_and_play
from tests.unit.launch.scoring import Closing


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, process_state: None) -> None:
    monkeypatch.setattr(collection, "open_console", lambda level: Console(file=io.StringIO()))


@pytest.fixture
def path(tmp_path: Path, model_directory: Path, letters: Path) -> Path:
    """A recipe over six letters, two rollouts each."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
collect: {{output_dir: {tmp_path / "out"}, num_repeats: 2, concurrency: 4}}
policy:
  model_name: {model_directory}
  precision: float32
  device: cpu
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 4}}
server: {{backend: hf}}
data: {{input: {{dataset_name: jsonl, data_path: {letters}, env_name: letters}}}}
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
    monkeypatch.setattr(collection, "open_engine", None)
    again = run(path, "collect.concurrency=1")
    assert (again.num_finished, again.num_new, again.mean_reward) == (12, 0, None)


def test_another_configuration_is_refused_with_each_difference(path: Path) -> None:
    run(path, "collect.limit=1")
    with pytest.raises(ConfigError, match=r"temperature: was 1\.0, is 0\.5") as error:
        run(path, "collect.limit=1", "policy.generation.temperature=0.5", "policy.generation.timeout_s=5")
    assert "timeout_s" not in str(error.value)
    with pytest.raises(ConfigError, match="holds a collection of other data; choose another directory: task 1 differs"):
        run(path, "collect.limit=2")


@pytest.mark.parametrize(
    "correction",
    [
        ("env.letters.type=tests.unit.launch.scoring:length", "policy.generation.temperature=0.5"),
        ("env.letters.type=tests.unit.launch.scoring:length", "collect.limit=2"),
        ("env.letters.type=tests.unit.launch.scoring:length", "collect.chunk=0/1"),
    ],
)
def test_a_collection_without_a_rollout_is_begun_anew_with_what_was_corrected(
    path: Path, correction: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RolloutError, match="in a row failed"):
        run(path, "env.letters.type=tests.unit.launch.scoring:raising", "collect.max_failures_in_a_row=3")
    with caplog.at_level("INFO"):
        corrected = run(path, *correction)
    assert (corrected.is_complete, corrected.num_given_up) == (True, 0)
    assert "beginning anew, since no rollout was stored: " in caplog.text
    assert [each.read_bytes() for each in (path.parent / "out").glob("*_failures.jsonl")] == [b""]
    assert profile(path.parent / "out").summaries[0].missing == 0
    with pytest.raises(ConfigError, match="choose another directory"):
        run(path, "collect.limit=1")


OVERLONG = "data.max_input_seq_length=25"  # tokens: those of a letter fit, those of fifty do not


@pytest.fixture
def with_overlong(path: Path, letters: Path) -> Path:
    """The recipe over a, 50 b, c, 50 d: an answer of n characters earns n + 1."""
    rows = [{"input": letter * count, "output": letter} for letter, count in zip("abcd", (1, 50, 1, 50), strict=True)]
    letters.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(path.read_text().replace("scoring:length", "scoring:one_more_than_length"))
    return path


def test_masked_prompts_are_not_sampled_and_count_as_wrong(
    with_overlong: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    collected = run(with_overlong, OVERLONG)
    assert (collected.is_complete, collected.num_finished) == (True, 8)
    found = {task: [row for row in rows(with_overlong) if row["task_index"] == task] for task in range(4)}
    for task, of_task in found.items():
        assert len(of_task) == 2
        assert all((row["reward"] > 0) == (row["num_turns"] == 1) == (task in (0, 2)) for row in of_task)
    assert {(r["stop_reason"], *r["response_faults"]) for r in found[1]} == {("truncated", "overlong_prompt")}
    said = "2 prompts of more than 25 tokens (data.max_input_seq_length) count as wrong (data.overlong: mask)"
    assert f"Over-long   {said}" in collection.format_result(collected)
    caplog.clear()
    whole = profile(with_overlong.parent / "out").summaries[0]
    assert said in caplog.text
    recount = sum(row["reward"] for row in rows(with_overlong)) / 8
    assert whole.scores["pass@1[avg-of-2]"].mean == pytest.approx(recount)
    assert whole.num_tasks == 4
    with pytest.raises(ConfigError, match=r"overlong\.treatment: was 'mask'|other data"):
        run(with_overlong, OVERLONG, "data.overlong=drop")


def test_dropped_prompts_are_left_out_and_reported(
    with_overlong: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    other = with_overlong.parent / "all"
    run(with_overlong, "policy.max_total_sequence_length=128", f"collect.output_dir={other}")
    ids = [task.prompt_id for task in read_tasks(other)]
    assert "left out" not in caplog.text
    collected = run(with_overlong, OVERLONG, "data.overlong=drop")
    assert (collected.is_complete, collected.num_finished) == (True, 4)
    said = (
        "2 prompts of more than 25 tokens (data.max_input_seq_length) are left out of all scores (data.overlong: drop)"
    )
    assert f"Over-long   {said}" in collection.format_result(collected)
    assert said in caplog.text
    assert [task.row["input"] for task in read_tasks(with_overlong.parent / "out")] == ["a", "c"]
    assert [row["prompt_id"] for row in rows(with_overlong)] == [ids[0], ids[0], ids[2], ids[2]]
    assert run_command(PROFILE, [str(with_overlong.parent / "out")]) == 0
    assert re.search(r"over-long prompts, left out\s*│\s*2", capsys.readouterr().out)


@pytest.mark.parametrize("overlong", ["mask", "drop", "refuse"])
def test_an_input_of_which_nothing_fits_is_refused(with_overlong: Path, overlong: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_input_seq_length = 3: .*has \d+ tokens"):
        run(with_overlong, "data.max_input_seq_length=3", f"data.overlong={overlong}")
    if overlong == "refuse":
        with pytest.raises(ConfigError, match=r"max_input_seq_length = 25: prompt .* has \d+ tokens"):
            run(with_overlong, OVERLONG, "data.overlong=refuse")


def test_a_model_is_told_by_its_weights(model_directory: Path, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in model_directory.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert model_digest(copied) == model_digest(model_directory)
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert model_digest(copied) != model_digest(model_directory)
    assert model_digest(tmp_path / "a-name-on-a-hub") is None


def test_rollouts_that_fail_each_time_are_told_and_make_the_command_fail(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(path), "env.letters.type=tests.unit.launch.scoring:raising", "collect.max_attempts=2"]
    assert run_command(recipe_commands.COLLECT, arguments) == 1
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
    assert run_command(recipe_commands.COLLECT, ["--config", str(path), "collect.limit=2", "collect.chunk=1/2"]) == 0
    out = capsys.readouterr().out
    assert f"Rollouts    2 of 2 in {path.parent / 'out'}" in out
    assert "nemo-rl merge" in out
    assert [row["task_index"] for row in rows(path, "rollouts-rs0-chunk1.jsonl")] == [1, 1]
    assert run_command(recipe_commands.COLLECT, ["--config", str(path), "collect.limits=2"]) == 2
    assert "did you mean collect.limit?" in capsys.readouterr().err
    assert run_command(recipe_commands.COLLECT, ["--config", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("collect:\n  output_dir:")


def test_a_signal_ends_it_cleanly_with_what_is_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = collection.collect_rollouts

    async def interrupted(stores: Any, *arguments: Any, on_rollout: Any, **options: Any) -> None:
        def after(trajectory: Any) -> None:
            on_rollout(trajectory)
            if stores[0].num_finished == 4:
                os.kill(os.getpid(), signal.SIGINT)

        await real(stores, *arguments, on_rollout=after, **options)
        await asyncio.sleep(60)

    monkeypatch.setattr(collection, "collect_rollouts", interrupted)
    assert run_command(recipe_commands.COLLECT, ["--config", str(path), "collect.concurrency=2"]) == 130
    assert "Continue    with the same command" in capsys.readouterr().out
    monkeypatch.setattr(collection, "collect_rollouts", real)
    assert run_command(recipe_commands.COLLECT, ["--config", str(path)]) == 0
    assert len({(row["task_index"], row["rollout_index"]) for row in rows(path)}) == len(rows(path)) == 12


def test_what_was_opened_is_closed(path: Path) -> None:
    Closing.closed.clear()
    run(path, "env.letters.type=tests.unit.launch.scoring:Closing", "collect.limit=1", "collect.max_attempts=1")
    assert Closing.closed == ["closed"]


def test_agents_are_collected_through_the_gateway(path: Path) -> None:
    agent = "{type: agent, function: 'tests.unit.launch.test_rollouts:ask', scored_by: letters}"
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
    path: Path, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "eval.yaml"
    text = path.read_text()
    recipe.write_text(
        text.replace(text.splitlines()[1], f"eval: {{output_dir: {tmp_path / 'evals'}, num_tests_per_prompt: 2}}")
    )
    other = tmp_path / "other"
    other.symlink_to(model_directory)
    config = recipe_commands.EVAL_JOB.load(recipe, [f"eval.baseline={other}"])
    assert recipe_commands.EVAL_JOB.run(config, "") == 0
    out = capsys.readouterr().out
    assert out.count("pass@2 ") >= 2
    assert f"of {model_directory} over 6 tasks" in out
    assert f"of {other} over 6 tasks" in out
    directories = sorted(path.name for path in (tmp_path / "evals").iterdir())
    assert len(directories) == 2


HERE = "tests.unit.launch.test_collection"


def length(messages: Sequence[dict[str, str]], metadata: dict[str, Any]) -> float:
    if messages[-1]["content"] == "":
        raise ValueError("nothing said")
    return float(len(messages[-1]["content"]))


@pytest.fixture
def config(tmp_path: Path) -> GRPORunConfig:
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(3)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
grpo: {{num_prompts_per_step: 1, num_generations_per_prompt: 2}}
policy: {{model_name: none, train_global_batch_size: 2, train_micro_batch_size: 2}}
data: {{train: {{dataset_name: jsonl, data_path: {data}, input_key: question, output_key: answer}},
        default: {{env_name: math}}}}
env: {{math: {{scorers: [length]}}}}
scorers: {{length: {{type: function, function: "{HERE}:length", weight: 0.5}}}}
"""
    )
    return load_config(recipe, [])


def stored(config: GRPORunConfig, path: Path) -> list[dict[str, Any]]:
    """Four rollouts: rewarded, rewarded by the scorer before, failed for want of a reward, failed in generation."""
    train, _ = load_prompts(config)
    outcomes: list[tuple[str, dict[str, float], Failure | None]] = [
        ("four", {"math": 1.0}, None),
        ("five5", {"math": 0.0, "length": 99.0}, None),
        ("six", {}, Failure(FailureClass.REWARD, "judge: no score")),
        ("", {}, Failure(FailureClass.INFRA, "died")),
    ]
    trajectories = [
        Trajectory(
            prompt=train.prompts[i % 3],
            group_id=f"0:{i}",
            generation_index=0,
            message_log=(TokenizedMessage(Message("assistant", text), ()),),
            stop_reason=StopReason.FAILED if failure else StopReason.TRUNCATED,
            rewards=rewards,
            failure=failure,
        )
        for i, (text, rewards, failure) in enumerate(outcomes)
    ]
    with RolloutWriter(path) as writer:
        asyncio.run(writer.write(1, trajectories))
    return rows_of(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_take_the_place_of_their_name_and_what_failed_otherwise_stays(
    config: GRPORunConfig, tmp_path: Path
) -> None:
    before = stored(config, tmp_path / "train.jsonl")
    means = rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")
    after = rows_of(tmp_path / "out.jsonl")
    assert [row["rewards"] for row in after] == [
        {"math": 1.0, "length": 2.0},
        {"math": 0.0, "length": 2.5},
        {},
        {},
    ]
    assert [row["reward"] for row in after] == [3.0, 2.5, None, None]
    assert after[2:] == before[2:]  # what math gave to the third is not stored
    assert [row["messages"] for row in after] == [row["messages"] for row in before]
    assert [row["stop_reason"] for row in after] == ["truncated", "truncated", "failed", "failed"]
    assert str(means[0]) == "mean reward 50.0000 over 2 rollouts, 2 failed"
    assert str(means[1]) == "mean reward 2.7500 over 2 rollouts, 2 failed"
    with pytest.raises(ConfigError, match="exists already"):
        rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")


def test_what_failed_for_want_of_a_score_is_scored_anew_where_rewards_are_scores_alone(
    config: GRPORunConfig, tmp_path: Path
) -> None:
    recipe = (tmp_path / "recipe.yaml").read_text().replace("{math: {scorers", "{math: {type: reward_model, scorers")
    (tmp_path / "recipe.yaml").write_text(recipe)
    config = load_config(tmp_path / "recipe.yaml", [])
    stored(config, tmp_path / "train.jsonl")
    rescore_file(config, tmp_path / "train.jsonl", tmp_path / "out.jsonl")
    after = rows_of(tmp_path / "out.jsonl")
    assert [row["reward"] for row in after[2:]] == [1.5, None]
    assert [row["stop_reason"] for row in after[2:]] == ["done", "failed"]


def test_a_failed_rollout_of_a_task_without_scorers_does_not_become_a_reward_of_zero(tmp_path: Path) -> None:
    prompt = Prompt("p", "unscored", (Message("user", "q"),), dataset="set")
    row = {
        "dataset": "set", "prompt_id": "p", "group_id": "0:p:0", "generation_index": 0, "messages": [], "rewards": {},
        "reward": None, "answer": None, "stop_reason": "failed", "failure": {"class": "reward", "cause": "no score"},
    }  # fmt: skip

    async def main() -> list[dict[str, Any]]:
        prompts = {("set", "p"): prompt}
        rows = rescore_rollouts([row], prompts, Scoring(), scorer_only_tasks=("unscored",), stall_timeout_s=60)
        return [one async for one in rows]

    assert asyncio.run(main()) == [row]


def test_rollouts_of_other_data_are_refused_and_no_output_appears(config: GRPORunConfig, tmp_path: Path) -> None:
    rows = stored(config, tmp_path / "train.jsonl")
    (tmp_path / "other.jsonl").write_text(json.dumps({**rows[0], "prompt_id": "unknown"}) + "\n")
    with pytest.raises(DataError, match="prompt unknown is not in the dataset"):
        rescore_file(config, tmp_path / "other.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "none.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="not a line of a rollouts file"):
        rescore_file(config, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


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
