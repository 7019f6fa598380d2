"""NeMo Gym's names at the boundary: read into a collection, written from one."""

import json
from typing import Any

import pytest

from nemo_rl import cli
from nemo_rl.collect.merge import merge
from nemo_rl.collect.nemo_gym_files import export_nemo_gym, import_nemo_gym
from nemo_rl.collect.profile import iter_task_rows, profile
from nemo_rl.collect.shards import KeySpace, RolloutKey, Task, read_tasks, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.rollout_rows import rollout_row
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    Prompt,
    StopReason,
    TokenizedMessage,
    ToolCall,
    Trajectory,
)
from tests.unit.collect.collections import collect

AGENT = {"type": "responses_api_agents", "name": "game_agent"}


def key(task: int, rollout: int) -> dict[str, int]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout}


def given(task: int, rollout: int) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"q{task}"}]},
        "expected": task,
        "agent_ref": AGENT,
        **key(task, rollout),
    }


def reply(task: int, rollout: int, reward: float, tokens: int, *, is_cut: bool = False) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"q{task}"}], "tools": []},
        "response": {
            "output": [{"type": "message", "role": "assistant", "content": []}],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {"input_tokens": 10, "output_tokens": tokens, "total_tokens": 10 + tokens},
        },
        "reward": reward,
        "info": {"deck": [task]},
        **key(task, rollout),
        "agent_ref": AGENT,
    }


REPLIES = [reply(1, 1, 0.0, 9, is_cut=True), reply(0, 1, 0.0, 5), reply(0, 0, 1.0, 7)]  # in the order they ended
FAILED = {**given(1, 0), "_ng_failure_class": "timeout", "error": "agent hung"}


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def gyms(tmp_path):
    write(tmp_path / "run_materialized_inputs.jsonl", [given(task, rollout) for task in (0, 1) for rollout in (0, 1)])
    write(tmp_path / "run.jsonl", REPLIES)
    write(tmp_path / "run_failures.jsonl", [FAILED])
    return tmp_path / "run.jsonl"


def test_a_collection_of_gym_is_profiled(gyms, tmp_path):
    store = import_nemo_gym(gyms, tmp_path / "c")
    assert (store.num_finished, store.num_missing) == (3, 1)
    first, second = iter_task_rows(profile(tmp_path / "c"))
    assert (first["reward"]["mean"], first["tokens"]["mean"], first["rollout_rewards"]) == (0.5, 6.0, [1.0, 0.0])
    assert (second["missing"], second["rollout_tokens"]) == (1, [None, 9])
    assert second["row"] == {name: value for name, value in given(1, 0).items() if not name.startswith("_ng_")}
    table = profile(tmp_path / "c").table
    assert table.datasets == ("game_agent",)
    assert table.stop_reasons == {"done": 2, "truncated": 1}
    (failure,) = rows(tmp_path / "c" / "rollouts-rs0_failures.jsonl")
    assert (failure["task_index"], failure["cause"]) == (1, "NeMo Gym: timeout: agent hung")


def test_equal_programs_are_one_vote(gyms, tmp_path):
    """Task 0 has two programs with one text, task 1 two that differ in a comment; each task has one that passes."""
    codes = {(0, 0): "print(1)", (0, 1): "print(1)", (1, 0): "print(2)", (1, 1): "print(2)  # two"}
    replies = [reply(*at, float(at[1] == 0), 5) | {"extracted_model_code": code} for at, code in codes.items()]
    write(gyms.with_name("run_failures.jsonl"), [])
    write(gyms, replies)
    import_nemo_gym(gyms, tmp_path / "c")
    table = profile(tmp_path / "c").table
    assert [len(set(answers)) for answers in table.answers.tolist()] == [1, 2]
    assert table.envs == ("game_agent",)
    assert {row["env"] for row in rows(tmp_path / "c" / "rollouts-rs0.jsonl")} == {"game_agent"}
    assert profile(tmp_path / "c").summaries[0].scores["majority@2"].mean == 0.5


def test_a_second_import_adds_what_is_new(gyms, tmp_path):
    import_nemo_gym(gyms, tmp_path / "c")
    before = rows(tmp_path / "c" / "rollouts-rs0.jsonl")
    write(gyms, [*REPLIES, reply(1, 0, 1.0, 3)])
    store = import_nemo_gym(gyms, tmp_path / "c")
    assert store.is_done
    assert rows(store.files.rollouts)[:3] == before
    assert len(rows(store.files.failures)) == 1


def test_what_came_from_gym_goes_back_as_it_was(gyms, tmp_path):
    import_nemo_gym(gyms, tmp_path / "c")
    files = export_nemo_gym(merge(tmp_path / "c", allow_partial=True).rollouts, tmp_path / "back.jsonl")
    by_key = sorted(REPLIES, key=lambda row: (row["_ng_task_index"], row["_ng_rollout_index"]))
    assert rows(files.rollouts) == by_key
    assert rows(files.inputs) == rows(gyms.with_name("run_materialized_inputs.jsonl"))


def test_what_gym_masked_or_marked_as_failed_is_no_rollout(gyms, tmp_path):
    masked = {**reply(0, 0, 0.0, 5), "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "away"}
    valid = {**reply(0, 1, 0.0, 5), "mask_sample": False, "failure_kind": "agent_timeout"}
    earlier = {**reply(1, 0, 0.0, 5), "mask_sample": True}  # before 0.7
    write(gyms, [masked, valid, earlier])
    store = import_nemo_gym(gyms, tmp_path / "c")
    assert (store.num_finished, store.num_missing) == (2, 2)
    failures = [(row["task_index"], row["class"], row["cause"]) for row in rows(store.files.failures)]
    assert failures == [
        (1, "environment", "NeMo Gym: timeout: agent hung"),
        (0, "reward", "NeMo Gym: judge_failed: away"),
    ]


def test_a_second_import_adds_failures_that_are_new_or_that_a_killed_one_left_out(gyms, tmp_path):
    masked = {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "away"}
    write(gyms, [{**reply(0, 0, 0.0, 5), **masked}])
    import_nemo_gym(gyms, tmp_path / "c")
    stored = tmp_path / "c" / "rollouts-rs0_failures.jsonl"
    at_first = stored.read_text()
    stored.write_text(at_first.splitlines(keepends=True)[0])  # as far as a killed import came
    import_nemo_gym(gyms, tmp_path / "c")
    assert stored.read_text() == at_first
    twice = [{**reply(0, 1, 0.0, 5), **masked}] * 2
    write(gyms, [{**reply(0, 0, 0.0, 5), **masked}, *twice])
    for _ in range(2):
        store = import_nemo_gym(gyms, tmp_path / "c")
        assert stored.read_text().startswith(at_first)
        assert [row["attempt"] for row in rows(stored)] == [1, 1, 1, 2]
    assert (store.num_finished, store.num_missing) == (0, 4)


def test_a_masked_row_of_a_rollout_that_has_a_valid_one_changes_nothing(gyms, tmp_path):
    valid = reply(0, 0, 1.0, 5)
    masked = {**reply(0, 0, 0.0, 5), "mask_sample": True, "failure_kind": "judge_failed"}
    write(gyms, [valid, masked])
    for _ in range(2):
        store = import_nemo_gym(gyms, tmp_path / "c")
    (row,) = rows(store.files.rollouts)
    assert row["reward"] == 1.0
    assert len(rows(store.files.failures)) == 1  # of run_failures.jsonl


def test_without_usage_the_token_ids_are_counted(gyms, tmp_path):
    bare = reply(0, 0, 1.0, 0)
    bare["response"] |= {"usage": None, "output": [{"generation_token_ids": [1, 2]}, {}, {"generation_token_ids": [3]}]}
    write(gyms, [bare])
    import_nemo_gym(gyms, tmp_path / "c")
    assert next(iter_task_rows(profile(tmp_path / "c")))["rollout_tokens"] == [3, None]


@pytest.mark.parametrize(
    ("row", "problem"),
    [({"reward": 1}, "without _ng_task_index"), (reply(5, 0, 1.0, 1), "not among the materialized inputs")],
)
def test_files_that_do_not_belong_together_are_refused(gyms, tmp_path, row, problem):
    write(gyms, [row])
    with pytest.raises(DataError, match=problem):
        import_nemo_gym(gyms, tmp_path / "c")


CALL = ToolCall("c1", "add", '{"a": 1}')
ROLLOUT = Trajectory(
    prompt=Prompt("p0", "sums", (Message("system", "Add."), Message("user", "1 + 1"))),
    group_id="p0",
    generation_index=0,
    message_log=(
        TokenizedMessage(Message("user", "0 + 0"), (1,)),
        TokenizedMessage(Message("assistant", "0"), (2,)),  # an example in the prompt
        TokenizedMessage(Message("user", "1 + 1"), (3,)),
        TokenizedMessage(Message("assistant", "", (CALL,)), (4, 5), (-0.5, -0.25)),
        TokenizedMessage(Message("tool", "2", tool_call_id="c1"), (6,)),
        TokenizedMessage(Message("assistant", "It is 2."), (7, 8, 9), (-0.1, -0.2, -0.3)),
    ),
    stop_reason=StopReason.TRUNCATED,
    rewards={"correct": 1.0},
    num_turns=2,
)


def test_a_rollout_of_ours_becomes_a_response(tmp_path):
    write_tasks(tmp_path, [Task("p0", "sums", "sums", {"question": "1 + 1"})])
    for seed in (3, 4):
        with RolloutStore.open(tmp_path, seed=seed, keys=KeySpace(1, 2), identity={}) as store:
            store.append_failure(RolloutKey(0, 1), Failure(FailureClass.INFRA, "gone"))
            for repeat in (0, 1):
                store.append(RolloutKey(0, repeat), rollout_row(ROLLOUT, write_token_ids=True))
    files = export_nemo_gym(merge(tmp_path).rollouts, tmp_path / "gym" / "run.jsonl")
    exported = rows(files.rollouts)
    assert [row["_ng_rollout_index"] for row in exported] == [0, 1, 2, 3]  # seed 4 goes on behind seed 3
    assert [row["_ng_rollout_index"] for row in rows(files.inputs)] == [0, 1, 2, 3]
    assert [row["_ng_rollout_index"] for row in rows(files.failures)] == [1, 3]
    row = exported[3]
    assert row["agent_ref"] == {"type": "responses_api_agents", "name": "sums"}
    assert [turn["content"] for turn in row["responses_create_params"]["input"]] == ["0 + 0", "0", "1 + 1"]
    assert row["response"]["usage"] == {"input_tokens": 4, "output_tokens": 5, "total_tokens": 9}
    assert row["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    call, output, message = row["response"]["output"]
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c1", "add")
    assert (call["prompt_token_ids"], call["generation_token_ids"]) == ([1, 2, 3], [4, 5])
    assert output == {"type": "function_call_output", "call_id": "c1", "output": "2"}
    assert message["content"][0]["text"] == "It is 2."
    assert message["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert message["generation_log_probs"] == [-0.1, -0.2, -0.3]


MESSAGES = [{"role": "user", "content": "\ude00 😀"}]


def test_half_a_surrogate_pair_is_replaced_since_gyms_reader_would_refuse_the_file(tmp_path):
    write_tasks(tmp_path, [Task("p0", "sums", "sums", {"question": "1 + \ud83d"})])
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(1, 1), identity={}) as store:
        store.append(RolloutKey(0, 0), {**rollout_row(ROLLOUT), "answer": "2", "messages": MESSAGES})
    merged = merge(tmp_path).rollouts
    assert rows(merged)[0]["messages"][0]["content"] == "\ude00 😀"
    files = export_nemo_gym(merged, tmp_path / "run.jsonl")
    assert rows(files.inputs)[0]["question"] == "1 + \ufffd"
    (row,) = rows(files.rollouts)
    assert row["responses_create_params"]["input"][0]["content"] == "\ufffd 😀"
    assert row["extracted_answer"] == row["extracted_model_code"] == "2"


def test_a_collection_without_its_input_cannot_be_exported(tmp_path):
    collect(tmp_path)
    with pytest.raises(ConfigError, match=r"tasks.jsonl"):
        export_nemo_gym(merge(tmp_path).rollouts, tmp_path / "gym.jsonl")


def test_both_ways_are_options_of_merge(gyms, tmp_path, capsys):
    options = ["--from-nemo-gym", str(gyms), "--to-nemo-gym", str(tmp_path / "back.jsonl"), "--allow-partial"]
    assert cli.run(["merge", str(tmp_path / "c"), *options]) == 0
    assert f"{tmp_path}/back_materialized_inputs.jsonl\n" in capsys.readouterr().out
    assert [task.dataset for task in read_tasks(tmp_path / "c")] == ["game_agent"] * 2
