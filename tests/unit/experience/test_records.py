"""Records of rollouts: metrics and pass@k against numbers worked out by hand, and the rows that are written."""

import asyncio
import json
import logging
import math
import threading
from collections import Counter
from dataclasses import replace
from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.experience import records
from nemo_rl.experience.records import (
    RolloutWriter,
    age_metrics,
    majority_at_k,
    pass_at_1_avg_of_k,
    pass_at_k,
    rollout_metrics,
)
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    Prompt,
    StopReason,
    Timings,
    TokenizedMessage,
    ToolCall,
    Trajectory,
    WeightSpan,
)


def context(num_tokens: int) -> TokenizedMessage:
    return TokenizedMessage(Message("user", ""), (1,) * num_tokens)


def sampled(num_tokens: int) -> TokenizedMessage:
    return TokenizedMessage(Message("assistant", ""), (1,) * num_tokens, (-1.0,) * num_tokens)


def rollout(log, reason: StopReason, rewards=None, *, turns: int = 1, task: str = "game", failure=None) -> Trajectory:
    return Trajectory(
        Prompt("p", task, ()), "g", 0, tuple(log), reason, rewards or {}, num_turns=turns, failure=failure
    )


def test_metrics_of_one_environment():
    metrics = rollout_metrics(
        [
            rollout([context(5), sampled(3), context(2), sampled(4)], StopReason.DONE, {"r": 1.0}, turns=2),
            rollout([context(5), sampled(8)], StopReason.TRUNCATED, {"r": 0.0}),
            rollout([context(5), sampled(1), context(1), sampled(1), context(0)], StopReason.MAX_TURNS, turns=2),
            rollout([context(50)], StopReason.FAILED, failure=Failure(FailureClass.INFRA, "x"), turns=0),
        ]
    )
    assert metrics == {
        "num_rollouts": 4,
        "failures/infra": 1,
        "failures/environment": 0,
        "failures/agent": 0,
        "failures/reward": 0,
        "failures/cancelled": 0,
        "natural_termination_rate": 0.25,
        "truncation_rate": 0.25,
        "max_turns_reached_rate": 0.25,
        "total_turns": 5,
        "avg_turns_per_sample": 5 / 3,
        "max_turns_per_sample": 2,
        "mean_total_tokens_per_sample": (14 + 13 + 8) / 3,
        "mean_gen_tokens_per_sample": (7 + 8 + 2) / 3,
        "max_gen_tokens_per_sample": 8,
        "mean_env_tokens_per_sample": 1.0,
        "env/game/reward_mean": 1 / 3,
        "env/game/turns": 5 / 3,
        "env/game/tokens": 17 / 3,
        "env/game/truncation_rate": 0.25,
        "env/game/num_failed": 1,
    }


def test_named_rewards_are_shown_apart():
    metrics = rollout_metrics(
        [
            rollout([sampled(1)], StopReason.DONE, {"format": 0.5, "correct": 1.0}),
            rollout([sampled(1)], StopReason.DONE, {"format": 0.0}),
        ]
    )
    assert metrics["reward/format"] == 0.25
    assert metrics["reward/correct"] == 1.0
    assert metrics["env/game/reward_mean"] == 0.75


def test_several_environments_have_all_metrics_each():
    failure = Failure(FailureClass.ENVIRONMENT, "x")
    metrics = rollout_metrics(
        [
            rollout([sampled(1)], StopReason.DONE, {"r": 1.0}, task="game"),
            rollout([sampled(3)], StopReason.DONE, {"r": 0.0}, task="math"),
            rollout([], StopReason.FAILED, task="tools", failure=failure),
        ]
    )
    assert (metrics["env/game/reward_mean"], metrics["env/math/reward_mean"]) == (1.0, 0.0)
    assert metrics["env/math/mean_gen_tokens_per_sample"] == 3
    assert metrics["env/tools/failures/environment"] == 1
    assert "env/tools/reward_mean" not in metrics


def test_agents_of_nemo_gym_are_environments_of_their_own():
    deal, ask = (
        replace(rollout([sampled(n)], StopReason.DONE, {"r": r}), prompt=Prompt("p", "nemo_gym", (), agent_name=agent))
        for agent, n, r in (("blackjack", 3, 1.0), ("mcqa", 5, 0.5))
    )
    failed = rollout([], StopReason.FAILED, task="math", failure=Failure(FailureClass.AGENT, "x"))
    metrics = rollout_metrics([deal, ask, failed])
    assert (metrics["env/blackjack/reward_mean"], metrics["env/mcqa/reward_mean"]) == (1.0, 0.5)
    assert (metrics["env/blackjack/tokens"], metrics["env/mcqa/tokens"]) == (3, 5)
    assert (metrics["env/math/num_failed"], metrics["env/mcqa/num_failed"]) == (1, 0)
    assert metrics["env/math/failures/agent"] == 1
    assert not any(name.startswith("env/nemo_gym") for name in metrics)


def test_no_rollouts_have_no_metrics():
    assert rollout_metrics([]) == {}


def test_age_counts_from_the_oldest_weights_of_rollouts_that_did_not_fail():
    done = rollout([sampled(1)], StopReason.DONE)
    failed = rollout([], StopReason.FAILED, failure=Failure(FailureClass.INFRA, "x"))
    rollouts = [replace(done, weight_versions=(3, 7)), replace(done, weight_versions=(6, 7)), failed]
    assert age_metrics(rollouts, weight_version=7) == {"avg_trajectory_age": 2.5, "max_trajectory_age": 4.0}
    assert age_metrics([failed], weight_version=7) == {}


ROLLOUT = Trajectory(
    prompt=Prompt("p", "game", (Message("user", "Frage: größer?"),), dataset="puzzles"),
    group_id="0:p:3",
    generation_index=1,
    message_log=(
        TokenizedMessage(Message("user", "Frage: größer?"), (1, 2, 3)),
        TokenizedMessage(Message("assistant", "ja", (ToolCall("c", "add", "{}"),)), (4, 0), (-0.5, -0.25)),
        TokenizedMessage(Message("tool", "3", tool_call_id="c"), ()),
    ),
    stop_reason=StopReason.DONE,
    rewards={"format": 0.5, "correct": 1.0},
    answer="ja",
    num_turns=1,
    weight_versions=(3, 4),
    timings=Timings(1.0, 0.5, 1.75),
)
FAILED = replace(ROLLOUT, stop_reason=StopReason.FAILED, rewards={}, failure=Failure(FailureClass.INFRA, "died"))


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_rollout_is_a_line(tmp_path):
    with RolloutWriter(tmp_path / "rollouts" / "train.jsonl") as writer:
        asyncio.run(writer.write(7, [ROLLOUT]))
    assert lines(writer.path) == [
        {
            "step": 7,
            "group_id": "0:p:3",
            "prompt_id": "p",
            "dataset": "puzzles",
            "task_name": "game",
            "generation_index": 1,
            "stop_reason": "done",
            "reward": 1.5,
            "rewards": {"format": 0.5, "correct": 1.0},
            "answer": "ja",
            "failure": None,
            "num_turns": 1,
            "num_tokens": 5,
            "num_generated_tokens": 2,
            "weight_versions": [3, 4],
            "timings": {"generation_s": 1.0, "environment_s": 0.5, "total_s": 1.75, "scoring_s": 0.0},
            "messages": [
                {"role": "user", "content": "Frage: größer?"},
                {
                    "role": "assistant",
                    "content": "ja",
                    "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}],
                },
                {"role": "tool", "content": "3", "tool_call_id": "c"},
            ],
        }
    ]


def test_failed_rollout_has_its_cause_and_no_reward(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(0, [FAILED]))
    (row,) = lines(writer.path)
    assert (row["reward"], row["rewards"]) == (None, {})
    assert row["failure"] == {"class": "infra", "cause": "died"}


def test_token_ids_and_logprobs_are_written_on_request(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl", write_token_ids=True) as writer:
        asyncio.run(writer.write(0, [ROLLOUT]))
    user, assistant, _ = lines(writer.path)[0]["messages"]
    assert user["token_ids"] == [1, 2, 3]
    assert "generation_logprobs" not in user
    assert (assistant["token_ids"], assistant["generation_logprobs"]) == ([4, 0], [-0.5, -0.25])


def test_message_that_an_update_cut_tells_which_tokens_are_whose(tmp_path):
    spans = (WeightSpan(3, 0, 1), WeightSpan(4, 1, 2))
    cut = replace(ROLLOUT.message_log[1], weight_spans=spans)
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(0, [replace(ROLLOUT, message_log=(cut, ROLLOUT.message_log[2]))]))
    assistant, tool = lines(writer.path)[0]["messages"]
    assert assistant["weight_spans"] == [[3, 0, 1], [4, 1, 2]]
    assert "weight_spans" not in tool


def test_further_histories_of_an_agent_are_written_where_there_are_some(tmp_path):
    other = (TokenizedMessage(Message("assistant", "nein"), (5,), (-1.0,)),)
    with RolloutWriter(tmp_path / "rollouts.jsonl") as writer:
        asyncio.run(writer.write(1, [ROLLOUT, replace(ROLLOUT, other_chains=(other,))]))
    plain, rewritten = lines(writer.path)
    assert "other_chains" not in plain
    assert rewritten["other_chains"] == [[{"role": "assistant", "content": "nein"}]]


def test_lines_are_appended_in_order_over_steps_and_runs(tmp_path):
    for first in (0, 2):
        with RolloutWriter(tmp_path / "train.jsonl") as writer:
            asyncio.run(writer.write(first, [ROLLOUT, FAILED]))
            asyncio.run(writer.write(first + 1, [ROLLOUT]))
    assert [row["step"] for row in lines(writer.path)] == [0, 0, 1, 2, 2, 3]


def test_every_line_is_strict_json_whatever_was_sampled(tmp_path):
    odd = TokenizedMessage(Message("assistant", "\ud800 \u2028 \x00"), (1,), (-math.inf,))
    with RolloutWriter(tmp_path / "train.jsonl", write_token_ids=True) as writer:
        asyncio.run(writer.write(0, [replace(ROLLOUT, message_log=(odd,))]))
    (line,) = writer.path.read_bytes().strip().split(b"\n")

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    message = json.loads(line, parse_constant=refuse)["messages"][0]
    assert message["generation_logprobs"] == [None]
    assert message["content"] == "\ud800 \u2028 \x00"


def test_file_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "train.jsonl").mkdir()
    with caplog.at_level(logging.ERROR), RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(0, [ROLLOUT]))
        asyncio.run(writer.write(1, [ROLLOUT] * 2))
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("rollouts cannot be written to")
    assert last.endswith("train.jsonl lacks 3 rollouts that could not be written")


def test_a_slow_disk_makes_the_run_wait_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_PENDING_ROLLOUTS", 2)
    disk = threading.Event()

    async def main(writer: RolloutWriter) -> None:
        await writer.write(0, [ROLLOUT] * 3)  # one call fits however large it is
        waiting = asyncio.ensure_future(writer.write(1, [ROLLOUT]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        disk.set()
        await waiting
        await writer.write(2, [ROLLOUT] * 2)

    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        monkeypatch.setattr(writer, "_row", lambda trajectory: disk.wait(60) and {})
        asyncio.run(main(writer))
    assert [row["step"] for row in lines(writer.path)] == [0, 0, 0, 1, 2, 2]


def test_a_disk_that_hangs_ends_the_run_and_the_log_counts_what_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(records, "MAX_PENDING_ROLLOUTS", 1)
    disk = threading.Event()
    writer = RolloutWriter(tmp_path / "train.jsonl", timeout_s=0.2)
    monkeypatch.setattr(writer, "_row", lambda trajectory: disk.wait(60) and {})
    asyncio.run(writer.write(0, [ROLLOUT] * 2))
    with pytest.raises(RolloutError, match=r"took too few of 2 rollouts in 0\.2 s to record those of step 1"):
        asyncio.run(writer.write(1, [ROLLOUT]))
    writer.close()
    assert caplog.messages[-1].endswith("train.jsonl lacks 2 rollouts that could not be written")
    disk.set()


def test_pass_at_k_of_binary_scores_has_the_closed_form() -> None:
    scores = [1.0] * 3 + [0.0] * 7
    for k in range(1, 11):
        assert pass_at_k(scores, k) == pytest.approx(1 - comb(7, k) / comb(10, k))


@given(st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_of_maxima_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert pass_at_k(scores, k) == pytest.approx(fmean(max(subset) for subset in combinations(scores, k)))


def test_avg_of_k_is_the_mean_and_pass_at_one() -> None:
    assert pass_at_1_avg_of_k([0.0, 1.0, 0.5, 0.5]) == 0.5 == pass_at_k([0.0, 1.0, 0.5, 0.5], 1)


def test_majority_takes_the_score_of_the_most_frequent_answer() -> None:
    assert majority_at_k([1.0, 1.0, 0.0, 0.0], ["7", "7", "9", None]) == 1.0
    assert majority_at_k([0.0, 0.0, 1.0], ["9", "9", "7"]) == 0.0


def test_majority_averages_ties_and_gives_silence_nothing() -> None:
    assert majority_at_k([1.0, 0.0], ["7", "9"]) == 0.5
    assert majority_at_k([1.0, 1.0], [None, None]) == 0.0
    assert majority_at_k([1.0, 0.0, 0.0], ["7", None, None]) == 1.0


def brute_force_majority(scores: list[float], answers: list[str | None], k: int) -> float:
    def one(subset: tuple[int, ...]) -> float:
        votes = Counter(answer for i in subset if (answer := answers[i]) is not None)
        winners = [answer for answer, n in votes.items() if n == max(votes.values())]
        by_winner = [fmean(scores[i] for i in subset if answers[i] == winner) for winner in winners]
        return fmean(by_winner) if by_winner else 0.0

    return fmean(one(subset) for subset in combinations(range(len(scores)), k))


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=7
    ),
    st.data(),
)
def test_majority_is_the_mean_over_all_subsets(rows: list[tuple[float, str | None]], data: st.DataObject) -> None:
    scores, answers = [score for score, _ in rows], [answer for _, answer in rows]
    k = data.draw(st.integers(1, len(rows)))
    assert majority_at_k(scores, answers, k) == pytest.approx(brute_force_majority(scores, answers, k))


@pytest.mark.parametrize("k", [0, 3])
def test_k_outside_of_the_number_of_answers_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to"):
        pass_at_k([0.0, 1.0], k)
    with pytest.raises(ConfigError, match="from 1 to"):
        majority_at_k([0.0, 1.0], ["a", "b"], k)
