"""The loop on rollouts: the order of a step, validations, checkpoints and stops."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import RequiredLogprobs
from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.loop import train
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.algorithms.validation import ValidationResult
from nemo_rl.errors import RolloutError
from nemo_rl.types import EnvStep, FailureClass
from tests.fakes.environments import Conversation, State
from tests.fakes.generation import FakeGeneration
from tests.support.metric_names import find_undocumented
from tests.unit.algorithms.run_setup import VOCAB_SIZE, Before, Rig, make_config, make_rig

SAVED = ("save", "finish_save")


def trained(rig: Rig) -> TrainingProgress:
    return asyncio.run(train(rig.run))


def interrupting(interrupt: Interrupt, on_call: int = 1) -> Before:
    """An environment that asks for the stop in one of its calls, and does not answer it."""
    num_calls = 0

    async def before(conversations: Sequence[Conversation]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= on_call:
            interrupt.request()
            await asyncio.Event().wait()

    return before


def same_reward(conversation: Conversation, state: State) -> EnvStep:
    return EnvStep(rewards={"score": 1.0})


def test_a_step_collects_trains_refits_validates_and_saves_in_this_order(tmp_path: Path) -> None:
    config = make_config(grpo={"max_num_steps": 2, "val_period": 1}, checkpointing={"save_period": 1})
    rig = make_rig(tmp_path, config)
    trained(rig)
    assert rig.calls == [
        "publish 0",
        *("next_groups 0", "train_step", "publish 1", "validate", "save"),
        *("next_groups 1", "train_step", "finish_save", "publish 2", "validate", "save", "finish_save"),
    ]


def test_a_checkpoint_that_is_written_in_time_is_complete_before_the_next_training(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 2}, checkpointing={"save_period": 1}))
    rig.policy.writes_slowly = False
    trained(rig)
    assert rig.calls == [
        "publish 0",
        *("next_groups 0", "train_step", "publish 1", "save"),
        *("next_groups 1", "finish_save", "train_step", "publish 2", "save", "finish_save"),
    ]


@pytest.mark.parametrize("in_flight", [False, True])
def test_rollouts_are_held_while_weights_change_and_while_a_validation_runs(tmp_path: Path, in_flight: bool) -> None:
    grpo = {"max_num_steps": 1, "val_at_end": True, "async_grpo": {"in_flight_weight_updates": in_flight}}
    rig = make_rig(tmp_path, make_config(grpo={**make_config().grpo.model_dump(), **grpo}))
    asyncio.run(train(rig.run))
    of_refits = [until_idle for place, until_idle in rig.source.holds if rig.calls[place].startswith("publish")]
    of_validations = [until_idle for place, until_idle in rig.source.holds if rig.calls[place] == "validate"]
    assert of_refits == [not in_flight, not in_flight]
    assert of_validations == [False]


def test_policy_and_engine_take_turns_on_a_shared_device(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 1}), shares_device=True)
    rig.generation.calls = rig.calls  # one record of both
    trained(rig)
    assert [call for call in rig.calls if not call.startswith("generate")] == [
        *("offload optimizer reference", "wake weights", "publish 0", "offload weights", "wake kv_cache"),
        "next_groups 0",
        *("sleep, discarding weights", "onload", "train_step"),
        *("offload optimizer reference", "wake weights", "publish 1", "offload weights", "wake kv_cache"),
        *("sleep", "onload weights optimizer", "save", "offload weights optimizer", "wake", "finish_save"),
    ]


def test_what_training_has_freed_is_given_back_before_a_refit_if_both_stay(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 2}), stays_with_engine=True)
    trained(rig)
    found = [call for call in rig.calls if call.startswith(("empty", "publish", "train"))]
    step = ["train_step", "empty_cache"]
    assert found == ["empty_cache", "publish 0", *step, "publish 1", *step, "publish 2"]


def test_what_was_learnt_is_saved_when_rollouts_fail_for_good(tmp_path: Path) -> None:
    def breaks_in_the_second_step(conversation: Conversation, state: State) -> EnvStep:
        if rig.policy.num_steps:
            raise RuntimeError("the judge is gone")
        return EnvStep(rewards={"score": 1.0})

    rig = make_rig(tmp_path, answer=breaks_in_the_second_step)
    with pytest.raises(RolloutError, match="the judge is gone"):
        trained(rig)
    assert list(rig.checkpoints()) == [1]


@pytest.mark.parametrize(
    ("needed", "passes"),
    [
        (RequiredLogprobs(previous=False, reference=False), []),
        (RequiredLogprobs(previous=True, reference=False), ["logprobs"]),
        (RequiredLogprobs(previous=True, reference=True), ["logprobs", "reference_logprobs"]),
    ],
)
def test_only_the_logprobs_that_someone_reads_are_computed(
    tmp_path: Path, needed: RequiredLogprobs, passes: list[str]
) -> None:
    config = make_config(grpo={"max_num_steps": 1}, checkpointing={"enabled": False})
    rig = make_rig(tmp_path, config, needed=needed)
    trained(rig)
    assert rig.calls == ["publish 0", "next_groups 0", *passes, "train_step", "publish 1"]
    (batch,) = rig.policy.batches
    assert ("prev_logprobs" in batch, "reference_logprobs" in batch) == (needed.previous, needed.reference)
    assert "advantages" in batch


def test_rollouts_are_sampled_under_the_weights_of_the_steps_before_them(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 3}))
    trained(rig)
    assert rig.generation.weight_version == rig.policy.num_steps == 3


def test_validation_comes_at_the_start_each_period_and_at_the_end(tmp_path: Path) -> None:
    grpo = {"max_num_steps": 5, "num_prompts_per_step": 1, "val_at_start": True, "val_period": 2, "val_at_end": True}
    rig = make_rig(tmp_path, make_config(grpo=grpo))
    training = trained(rig)
    assert rig.validations() == list(training.validations) == [0, 2, 4, 5]


def test_a_last_step_in_the_validation_period_validates_once(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 2, "val_period": 2, "val_at_end": True}))
    trained(rig)
    assert rig.calls.count("validate") == 1


def test_without_validation_sets_nothing_is_validated(tmp_path: Path) -> None:
    config = make_config(grpo={"max_num_steps": 1, "val_at_start": True, "val_at_end": True})
    rig = make_rig(tmp_path, config, validation=())
    assert trained(rig).validations == {}


def test_training_ends_at_max_num_steps_with_a_checkpoint(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 3}))
    training = trained(rig)
    assert training.position.step == 3
    assert not training.data_exhausted
    assert not training.interrupted
    assert list(rig.checkpoints()) == [3]
    assert rig.source.state_dict()["consumed_prompts"] == 6  # nothing is drawn ahead


def test_training_ends_with_the_data_after_a_short_step_a_validation_and_a_checkpoint(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"val_at_end": True}), num_prompts=5)
    training = trained(rig)
    assert training.data_exhausted
    assert training.position.step == 3
    assert [len(batch) for batch in rig.policy.batches] == [6, 6, 3]
    assert rig.validations() == [3]
    assert list(rig.checkpoints()) == [3]
    assert rig.calls[-4:] == ["next_groups 3", "validate", "save", "finish_save"]


def test_the_end_of_the_data_repeats_neither_validation_nor_checkpoint_of_its_step(tmp_path: Path) -> None:
    config = make_config(grpo={"val_period": 1, "val_at_end": True}, checkpointing={"save_period": 1})
    rig = make_rig(tmp_path, config, num_prompts=2)
    trained(rig)
    assert (rig.calls.count("validate"), rig.calls.count("save")) == (1, 1)


def test_a_run_that_had_ended_trains_no_further_when_started_again(tmp_path: Path) -> None:
    trained(make_rig(tmp_path, make_config(grpo={"max_num_steps": 2})))
    again = make_rig(tmp_path, make_config(grpo={"max_num_steps": 2, "val_at_start": True}))
    assert trained(again).position.step == 2
    assert again.calls == ["load", "publish 2"]


def test_rollouts_that_all_fail_end_the_run_with_their_cause(tmp_path: Path) -> None:
    generation = FakeGeneration(vocab_size=VOCAB_SIZE, failing_share=1.0)
    config = make_config(grpo={"max_num_steps": 2}, rollout={"max_failed_share": 1.0, "max_retries": 0})
    rig = make_rig(tmp_path, config, generation=generation)
    with pytest.raises(RolloutError, match=r"6 of 6 rollouts failed.*class infra.*made to fail"):
        trained(rig)
    assert "train_step" not in rig.calls
    assert rig.logger.metrics == {}


def test_a_stop_during_generation_saves_the_last_step_and_the_prompts_are_drawn_again(tmp_path: Path) -> None:
    config = make_config(grpo={"max_num_steps": 4})
    interrupt = Interrupt()
    before = interrupting(interrupt, on_call=6 + 1)  # six rollouts a step: in the second step
    stopped = make_rig(tmp_path / "stopped", config, before_training=before, interrupt=interrupt)
    training = trained(stopped)
    assert training.interrupted
    assert training.position.step == 1
    assert stopped.calls == ["publish 0", "next_groups 0", "train_step", "publish 1", "next_groups 1", *SAVED]

    whole = make_rig(tmp_path / "whole", config)
    trained(whole)
    resumed = make_rig(tmp_path / "stopped", config)
    trained(resumed)
    assert stopped.source.drawn + resumed.source.drawn == whole.source.drawn
    assert resumed.steps() == {step: metrics for step, metrics in whole.steps().items() if step > 1}


def test_a_stop_during_the_first_generation_leaves_nothing_to_save(tmp_path: Path) -> None:
    interrupt = Interrupt()
    rig = make_rig(tmp_path, before_training=interrupting(interrupt), interrupt=interrupt)
    training = trained(rig)
    assert training.interrupted
    assert rig.checkpoints() == {}


def test_a_stop_during_training_finishes_the_step_and_saves_it(tmp_path: Path) -> None:
    interrupt = Interrupt()
    rig = make_rig(tmp_path, on_train_step=lambda step: interrupt.request(), interrupt=interrupt)
    training = trained(rig)
    assert training.interrupted
    assert rig.calls == ["publish 0", "next_groups 0", "train_step", "publish 1", *SAVED]
    assert list(rig.checkpoints()) == list(rig.steps()) == [1]


def test_a_stop_while_rollouts_end_before_an_update_keeps_the_step_and_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt()
    config = make_config(grpo={"val_period": 1})
    rig = make_rig(tmp_path, config, on_train_step=lambda step: interrupt.request(), interrupt=interrupt)

    @asynccontextmanager
    async def hold(*, until_idle: bool = False) -> AsyncIterator[None]:
        if interrupt.requested:
            await asyncio.Event().wait()  # for a rollout that runs on
        yield

    monkeypatch.setattr(rig.run.source, "hold", hold)
    assert trained(rig).interrupted
    assert rig.calls == ["publish 0", "next_groups 0", "train_step", *SAVED]
    assert list(rig.checkpoints()) == list(rig.steps()) == [1]


def test_a_stop_during_validation_keeps_the_step_its_metrics_and_its_checkpoint(tmp_path: Path) -> None:
    interrupt = Interrupt()
    config = make_config(grpo={"val_period": 1})
    rig = make_rig(tmp_path, config, before_validation=interrupting(interrupt), interrupt=interrupt)
    training = trained(rig)
    assert training.interrupted
    assert training.validations == {}
    assert list(rig.steps()) == [1]
    assert rig.checkpoints()[1]["train:reward"] == rig.steps()[1]["train/reward"]


def test_a_stop_during_the_validation_before_training_ends_the_run(tmp_path: Path) -> None:
    interrupt = Interrupt()
    config = make_config(grpo={"val_at_start": True})
    rig = make_rig(tmp_path, config, before_validation=interrupting(interrupt), interrupt=interrupt)
    assert trained(rig).interrupted
    assert rig.calls == ["publish 0", "validate"]


def test_a_stop_during_the_validation_after_the_data_still_saves(tmp_path: Path) -> None:
    interrupt = Interrupt()
    config = make_config(grpo={"val_at_end": True})
    before = interrupting(interrupt)
    rig = make_rig(tmp_path, config, num_prompts=2, before_validation=before, interrupt=interrupt)
    training = trained(rig)
    assert training.interrupted
    assert training.data_exhausted
    assert list(rig.checkpoints()) == [1]
    assert rig.calls.count("save") == 1


def waiting_for_step(release: asyncio.Event) -> Before:
    """An environment that answers once the event is set."""

    async def before(conversations: Sequence[Conversation]) -> None:
        await release.wait()

    return before


def overlapping(directory: Path, **changes: Any) -> Rig:
    """A run of two steps whose first validation ends no sooner than the second step trains."""
    release = asyncio.Event()
    config = make_config(
        grpo={"max_num_steps": 2, "val_period": 1, "val_overlap": True, **changes.pop("grpo", {})},
        checkpointing={"save_period": 1},
    )
    return make_rig(
        directory,
        config,
        before_validation=changes.pop("before_validation", waiting_for_step(release)),
        on_train_step=lambda step: release.set() if step == 2 else None,
        **changes,
    )


def test_a_validation_overlaps_the_next_step_and_its_refit_waits(tmp_path: Path) -> None:
    rig = overlapping(tmp_path / "overlap")
    training = trained(rig)
    without_validate = [call for call in rig.calls if call != "validate"]
    assert without_validate == [
        "publish 0",
        *("next_groups 0", "train_step", "publish 1", "save"),
        *("next_groups 1", "train_step", "finish_save", "publish 2", "save", "finish_save"),
    ]
    assert rig.calls.index("publish 1") < rig.calls.index("validate") < rig.calls.index("publish 2")
    plain = make_config(grpo={"max_num_steps": 2, "val_period": 1}, checkpointing={"save_period": 1})
    alone = make_rig(tmp_path / "alone", plain)
    assert training.validations == trained(alone).validations
    assert list(rig.checkpoints()) == list(alone.checkpoints()) == [1, 2]
    for step, metrics in alone.checkpoints().items():
        assert {name: rig.checkpoints()[step][name] for name in metrics if name.startswith("val:")} == {
            name: value for name, value in metrics.items() if name.startswith("val:")
        }


def test_a_checkpoint_waits_for_the_validation_that_ranks_it(tmp_path: Path) -> None:
    rig = overlapping(tmp_path)
    rig.policy.writes_slowly = False
    trained(rig)
    assert rig.calls.index("finish_save") > rig.calls.index("train_step", rig.calls.index("next_groups 1"))
    assert "val:accuracy" in rig.checkpoints()[1]


def test_a_validation_that_ends_during_the_rollouts_delays_no_checkpoint(tmp_path: Path) -> None:
    validated = asyncio.Event()

    class RecordedValidator:
        """Sets the event with its return, so that the validation's task has ended when a waiter wakes."""

        async def validate(self) -> ValidationResult:
            assert rig.run.validator is not None
            result = await rig.run.validator.validate()
            validated.set()
            return result

    async def wait_for_validation(conversations: Sequence[Conversation]) -> None:
        if rig.policy.num_steps:  # the rollouts of the second step
            await validated.wait()

    background = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 0}}
    rig = overlapping(tmp_path, grpo=background, before_validation=None, before_training=wait_for_validation)
    rig.policy.writes_slowly = False
    asyncio.run(train(replace(rig.run, validator=RecordedValidator())))  # type: ignore[arg-type]
    assert rig.calls.index("finish_save") < rig.calls.index("train_step", rig.calls.index("next_groups 1"))
    assert "val:accuracy" in rig.checkpoints()[1]


def test_on_a_shared_device_a_validation_ends_before_training(tmp_path: Path) -> None:
    rig = overlapping(tmp_path, before_validation=None, shares_device=True)
    rig.generation.calls = rig.calls
    trained(rig)
    begun = rig.calls.index("next_groups 1")
    slept = rig.calls.index("sleep, discarding weights", begun)
    assert begun < rig.calls.index("validate") < slept
    assert not [call for call in rig.calls[slept : rig.calls.index("publish 2")] if call.startswith("generate")]


def test_the_end_of_the_data_waits_for_the_running_validation(tmp_path: Path) -> None:
    rig = overlapping(tmp_path, grpo={"max_num_steps": 9, "val_at_end": True}, before_validation=None, num_prompts=2)
    assert list(trained(rig).validations) == [1]
    assert rig.calls.count("validate") == 1
    assert "val:accuracy" in rig.checkpoints()[1]


def test_a_stop_discards_the_running_validation_and_saves_the_step(tmp_path: Path) -> None:
    interrupt = Interrupt()
    rig = overlapping(tmp_path, before_validation=interrupting(interrupt), interrupt=interrupt)
    training = trained(rig)
    assert training.interrupted
    assert training.validations == {}
    assert training.running_validation is None
    assert "train:reward" in rig.checkpoints()[training.position.step]


class BrokenValidator:
    async def validate(self) -> ValidationResult:
        raise RolloutError("the engine is gone")


def test_what_a_validation_raises_ends_the_run_with_a_checkpoint_of_what_was_trained(tmp_path: Path) -> None:
    rig = overlapping(tmp_path)
    run = replace(rig.run, validator=BrokenValidator())  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="the engine is gone"):
        asyncio.run(train(run))
    assert max(rig.checkpoints()) == rig.policy.num_steps


def test_error_of_a_validation_is_logged_where_another_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_after_the_first_step(conversation: Conversation, state: State) -> EnvStep:
        if rig.policy.num_steps:
            raise RuntimeError("the judge is gone")
        return EnvStep(rewards={"score": 1.0})

    failed = asyncio.Event()

    class FailingValidator:
        async def validate(self) -> ValidationResult:
            failed.set()
            raise RuntimeError("the held-out questions are gone")

    async def wait_for_failure(conversations: Sequence[Conversation]) -> None:
        if rig.policy.num_steps:
            await failed.wait()

    background = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 0}}
    rig = overlapping(tmp_path, grpo=background, answer=break_after_the_first_step, before_training=wait_for_failure)
    with pytest.raises(RolloutError, match="the judge is gone"):
        asyncio.run(train(replace(rig.run, validator=FailingValidator())))  # type: ignore[arg-type]
    (record,) = [one for one in caplog.records if one.getMessage() == "the validation after step 1 failed"]
    assert record.exc_info is not None
    assert "held-out questions" in str(record.exc_info[1])


class BrokenDetails:
    """Details that cannot be recorded."""

    def mark(self, step: int, batch: Any) -> None:
        """Nothing is marked."""

    async def record(self, step: int, batch: Any, rows: Any, policy: Any) -> None:
        raise RolloutError(f"no details of step {step}")


def test_a_step_counts_as_trained_before_its_details_are_recorded(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with pytest.raises(RolloutError, match="no details of step 1"):
        asyncio.run(train(replace(rig.run, details=BrokenDetails())))  # type: ignore[arg-type]
    assert list(rig.checkpoints()) == [rig.policy.num_steps] == [1]


def test_all_metrics_of_a_run_are_documented_and_those_expected_are_there(tmp_path: Path) -> None:
    grpo = {"max_num_steps": 1, "val_period": 1, "val_num_generations_per_prompt": 2, "val_greedy": True}
    grpo |= {"seq_logprob_error_threshold": 2.0}
    needed = RequiredLogprobs(previous=True, reference=False)
    rig = make_rig(tmp_path, make_config(grpo=grpo), needed=needed)
    trained(rig)
    (metrics,) = rig.logger.metrics.values()
    assert find_undocumented(metrics) == []
    assert metrics.keys() >= {
        *("train/loss", "train/grad_norm", "train/lr", "train/reward", "train/shaped_reward", "train/advantages/mean"),
        *("train/mean_gen_tokens_per_sample", "train/failures/infra", "train/env/trained/reward_mean"),
        *("train/token_mult_prob_error", "train/gen_kl_error", "train/max_seq_mult_prob_error"),
        *("timing/train/total_step_time", "timing/train/generation", "timing/train/weight_sync"),
        *("timing/train/checkpointing", "timing/validation/total_validation_time"),
        *("performance/tokens_per_sec", "performance/samples_per_sec", "performance/generation_tokens_per_sec"),
        *("validation/accuracy", "validation/greedy_accuracy", "validation/pass_2", "validation/avg_length"),
    }
    assert metrics["train/token_mult_prob_error"] == 1.0  # the fake policy agrees with its engine
    assert metrics["train/num_rollouts"] == 6


def test_a_step_that_saves_nothing_has_no_time_for_it(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(grpo={"max_num_steps": 2}))
    trained(rig)
    saving = ["timing/train/checkpointing" in metrics for metrics in rig.logger.metrics.values()]
    assert saving == [False, True]


def test_the_reward_before_dynamic_sampling_is_the_reward_of_the_step(tmp_path: Path) -> None:
    def answer(conversation: Conversation, state: State) -> EnvStep:
        """Only answers to the first question differ in their reward."""
        differs = "question0" in conversation[0].content
        return EnvStep(rewards={"score": float(len(conversation[-1].content)) if differs else -100.0})

    config = make_config(
        grpo={"max_num_steps": 1, "use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 9},
        data={"shuffle": False},
    )
    rig = make_rig(tmp_path, config, num_prompts=2, answer=answer)
    trained(rig)
    (metrics,) = rig.steps().values()
    assert metrics["train/filtered_reward"] >= 0
    assert metrics["train/reward"] == pytest.approx((metrics["train/filtered_reward"] - 100.0) / 2)
    assert metrics["train/num_rollouts"] == 6
    assert len(rig.policy.batches[0]) == 3


def test_a_checkpoint_holds_the_metrics_of_its_step_and_of_the_validation_after_it(tmp_path: Path) -> None:
    config = make_config(grpo={"max_num_steps": 2, "val_period": 2}, checkpointing={"save_period": 1})
    rig = make_rig(tmp_path, config)
    trained(rig)
    first, second = rig.checkpoints().values()
    assert first["train:reward"] == rig.steps()[1]["train/reward"]
    assert not any(name.startswith("val:") for name in first)
    assert second["val:accuracy"] == rig.logger.metrics[2]["validation/accuracy"]


def test_the_checkpoint_at_the_end_of_the_data_is_ranked_by_its_training_metrics(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, make_config(checkpointing={"metric_name": "train:reward"}), num_prompts=4)
    trained(rig)
    assert rig.checkpoints()[2]["train:reward"] == rig.steps()[2]["train/reward"]


def test_overlong_filtering_takes_the_gradient_from_truncated_rollouts(tmp_path: Path) -> None:
    config = make_config(
        grpo={"max_num_steps": 1, "overlong_filtering": True},
        policy={"generation": {"max_new_tokens": 2}},
    )
    rig = make_rig(tmp_path, config)
    trained(rig)
    (batch,) = rig.policy.batches
    assert bool(batch["truncated"].any())
    assert batch["sample_mask"].tolist() == [0.0 if truncated else 1.0 for truncated in batch["truncated"].tolist()]


def test_overlong_shaping_without_a_response_limit_measures_by_the_sequence_limit(tmp_path: Path) -> None:
    config = make_config(
        grpo={"max_num_steps": 1, "reward_shaping": {"enabled": True, "overlong_buffer_length": 64}},
        policy={"generation": {"max_new_tokens": None}},
    )
    rig = make_rig(tmp_path, config, answer=same_reward)
    trained(rig)
    (batch,) = rig.policy.batches
    expected = 1.0 - batch["token_mask"].sum(-1) / 64  # the buffer begins at length 0
    assert batch["reward"].tolist() == pytest.approx(expected.tolist())


def test_failed_rollouts_of_a_step_are_counted_and_not_trained_on(tmp_path: Path) -> None:
    generation = FakeGeneration(vocab_size=VOCAB_SIZE, failing_share=0.3)
    config = make_config(
        grpo={"max_num_steps": 1, "num_generations_per_prompt": 8}, rollout={"max_failed_share": 1.0, "max_retries": 0}
    )
    rig = make_rig(tmp_path, config, generation=generation)
    trained(rig)
    (metrics,) = rig.steps().values()
    num_failed = metrics[f"train/failures/{FailureClass.INFRA}"]
    assert 0 < num_failed < 16
    assert len(rig.policy.batches[0]) == 16 - num_failed
