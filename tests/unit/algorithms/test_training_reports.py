"""Reports of a step and of a validation."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.algorithms.loop import train
from nemo_rl.algorithms.training_reports import SAMPLE_COLUMNS, efficiency, report_step, sample_rows, throughput
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import FailureClass, Message, TokenizedMessage
from tests.unit.algorithms.rollouts import make_trajectory
from tests.unit.algorithms.run_setup import make_config, make_rig

NO_FAILURES = {f"failures/{failure_class}": 0.0 for failure_class in FailureClass}
METRICS = {
    "total_num_tokens": 600.0,
    "global_valid_seqs": 6.0,
    "global_valid_toks": 60.0,
    "num_rollouts": 12.0,
    "mean_gen_tokens_per_sample": 20.0,
    **NO_FAILURES,
}
SECONDS = {"total_step_time": 14.0, "generation": 2.0, "policy_training": 3.0}


def test_rates_leave_out_the_time_of_the_validation() -> None:
    rates = throughput(METRICS, SECONDS, validation_s=4.0)
    assert rates["samples_per_sec"] == 0.6
    assert rates["tokens_per_sec"] == 60.0
    assert rates["policy_training_tokens_per_sec"] == 200.0
    assert rates.keys().isdisjoint({"train_flops", "mfu"})


def test_rates_per_device_and_the_share_of_their_peak() -> None:
    counts = {"train_flops": 900.0, "train_peak_flops": 2000.0}
    rates = throughput(METRICS | counts, SECONDS, validation_s=4.0, num_devices=3, num_train_devices=2)
    assert rates["tokens_per_sec_per_device"] == 20.0
    assert rates["policy_training_tokens_per_sec_per_device"] == 100.0
    assert rates["mfu"] == 0.15  # 900 operations in 3 s, of 2000 per second


def test_sampled_tokens_are_those_of_all_rollouts_that_did_not_fail() -> None:
    metrics = METRICS | {"failures/infra": 1.0, "failures/agent": 1.0}
    assert throughput(metrics, SECONDS, 0.0)["generation_tokens_per_sec"] == 100.0  # 10 x 20 tokens in 2 s


def test_rollouts_in_the_background_are_made_in_the_whole_step() -> None:
    seconds = {"total_step_time": 14.0, "exposed_generation": 1.0, "policy_training": 3.0}
    assert throughput(METRICS, seconds, validation_s=4.0)["generation_tokens_per_sec"] == 24.0  # 12 x 20 tokens in 10 s


def test_waits_of_the_trainer_are_told_by_cause_and_its_work_as_a_share() -> None:
    seconds = {
        "total_step_time": 20.0,
        "exposed_generation": 2.0,
        "policy_and_reference_logprobs": 1.0,
        "policy_training": 4.0,
        "weight_sync": 0.5,
    }
    assert efficiency(seconds, validation_s=3.0) == {
        "training_busy_pct": 25.0,
        "exposed_wait_s/generation": 2.0,
        "exposed_wait_s/weight_sync": 0.5,
        "exposed_wait_s/checkpointing": 0.0,
        "exposed_wait_s/teachers": 0.0,
        "exposed_wait_s/validation": 3.0,
    }


def test_flops_are_a_rate_of_training() -> None:
    assert throughput(METRICS | {"train_flops": 9.0}, SECONDS, 0.0)["train_flops"] == 3.0


def test_phases_that_took_no_time_divide_by_nothing() -> None:
    rates = throughput(METRICS, dict.fromkeys(SECONDS, 0.0), 0.0)
    assert all(rate > 0 for rate in rates.values())


def test_a_step_is_logged_under_its_prefixes_without_the_time_of_its_validation(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    timer = StepTimer(clock=lambda: 0.0)
    for phase in ("total_step_time", "generation", "policy_training", "total_validation_time"):
        with timer(phase):
            pass
    report_step(rig.run, 7, METRICS, timer, move_s={"sleep": 0.25})
    (logged,) = rig.logger.metrics.items()
    assert logged[0] == 7
    assert logged[1]["train/total_num_tokens"] == 600.0
    assert {name for name in logged[1] if name.startswith("timing/")} == {
        *(f"timing/train/{phase}" for phase in ("total_step_time", "generation", "policy_training")),
        "timing/moves/sleep",
    }


def test_a_sample_row_shows_prompt_response_reward_and_how_it_ended() -> None:
    assert sample_rows([make_trajectory(0.25)]) == [("?", "!", "0.250", "done")]
    assert len(SAMPLE_COLUMNS) == 4


def test_a_sample_row_of_several_turns_names_the_roles() -> None:
    one = make_trajectory(1.0)
    more = (
        TokenizedMessage(Message("user", "and?"), (4,)),
        TokenizedMessage(Message("assistant", "so!"), (5,), (-0.5,)),
    )
    ((_, response, _, _),) = sample_rows([replace(one, message_log=one.message_log + more)])
    assert response == "assistant: !\nuser: and?\nassistant: so!"


def test_a_sample_row_of_a_failed_rollout_shows_the_cause() -> None:
    ((_, _, reward, stop_reason),) = sample_rows([make_trajectory(None)])
    assert (reward, stop_reason) == ("failed: EngineDead: replica 0", "failed")


@pytest.mark.parametrize(("period", "steps"), [(0, []), (2, [2]), (1, [1, 2, 3])])
def test_training_rollouts_are_a_table_each_period(tmp_path: Path, period: int, steps: list[int]) -> None:
    config = make_config(grpo={"max_num_steps": 3, "val_period": 0}, logger={"train_samples_period": period})
    rig = make_rig(tmp_path, config)
    asyncio.run(train(rig.run))
    tables = [table for table in rig.logger.tables if table[0] == "train/samples"]
    assert [(columns, step) for _, columns, _, step in tables] == [(SAMPLE_COLUMNS, step) for step in steps]
    assert all(rows for _, _, rows, _ in tables)


@pytest.mark.parametrize("num_shown", [0, 2])
def test_a_validation_writes_all_of_its_rollouts_and_shows_the_first(tmp_path: Path, num_shown: int) -> None:
    config = make_config(grpo={"max_num_steps": 1, "val_period": 1}, logger={"num_val_samples_to_print": num_shown})
    rig = make_rig(tmp_path, config)
    with RolloutWriter(tmp_path / "validation.jsonl") as writer:
        asyncio.run(train(replace(rig.run, validation_rollouts=writer)))
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == ["held_out0", "held_out1", "held_out2"]
    assert {row["step"] for row in rows} == {1}
    ((name, columns, shown, step),) = rig.logger.tables
    assert (name, columns, len(shown), step) == ("validation/samples", SAMPLE_COLUMNS, num_shown, 1)
