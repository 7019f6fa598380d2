"""The semantics of a rollout, on the state machine alone."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl.environments.boundary import RESPONSE_TRUNCATED
from nemo_rl.experience.turns import (
    TRUNCATED_BEFORE_REWARD,
    EnvironmentCall,
    Episode,
    RolloutJob,
    TurnRules,
    encode_prompt,
    request_seed,
)
from nemo_rl.types import (
    Completion,
    EnvStep,
    Failure,
    FailureClass,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
    StopReason,
    TokenizedMessage,
    ToolCall,
    WeightSpan,
)
from tests.fakes.encoder import BEGIN, END, FakeEncoder

PROMPT = Prompt("p", "game", (Message("user", "ab"),), {"answer": "c"})  # tokens: BEGIN 2 3 BEGIN
SAMPLING = SamplingParams(max_new_tokens=5, stop_token_ids=(END,), stop_strings=("stop",))
JOB = RolloutJob(PROMPT, "g", 1, epoch=2)
RULES = TurnRules(max_turns=3, max_total_length=100, sampling=SAMPLING, seed=7)
GO_ON = EnvStep(observation=(Message("user", "cd"),), done=False)  # tokens: BEGIN 4 5 BEGIN


def episode(rules: TurnRules = RULES, prompt: Prompt = PROMPT) -> Episode:
    encoder = FakeEncoder()
    return Episode(RolloutJob(prompt, "g", 1, epoch=2), encode_prompt(prompt, encoder), encoder, rules)


def respond(episode: Episode, *token_ids: int, finish: str = "stop", versions: tuple[int, int] = (0, 0)) -> None:
    request = generation(episode)
    logprobs = tuple(-0.5 for _ in token_ids)
    assert finish in ("stop", "length")
    episode.apply_response(Completion(request.request_id, token_ids, logprobs, finish, versions))  # type: ignore[arg-type]


def generation(episode: Episode) -> GenerationRequest:
    assert isinstance(episode.action, GenerationRequest)
    return episode.action


def call(episode: Episode) -> EnvironmentCall:
    assert isinstance(episode.action, EnvironmentCall)
    return episode.action


def test_first_request_holds_prompt_seed_and_configured_sampling():
    request = generation(episode())
    assert request.token_ids == (BEGIN, 2, 3, BEGIN)
    assert request.sampling == SAMPLING
    assert request.seed == request_seed(7, JOB, 0)
    assert (request.request_id, request.session_id) == ("g:1:0", "g:1")


def test_seed_is_stable_and_differs_by_each_of_its_parts():
    assert request_seed(7, JOB, 0) == 4927793195473220054
    other_prompt = replace(JOB, prompt=replace(JOB.prompt, prompt_id="q"))
    jobs = [JOB, replace(JOB, epoch=3), replace(JOB, generation_index=2), replace(JOB, attempt=1), other_prompt]
    seeds = {request_seed(7, job, 0) for job in jobs} | {request_seed(8, JOB, 0), request_seed(7, JOB, 1)}
    assert len(seeds) == len(jobs) + 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_next_request_appends_sampled_and_bridge_tokens_to_the_past():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(GO_ON)
    assert generation(e).token_ids == (BEGIN, 2, 3, BEGIN, 9, END, BEGIN, 4, 5, BEGIN)
    assert generation(e).request_id == "g:1:1"
    assert generation(e).seed == request_seed(7, JOB, 1)


def test_cut_response_is_scored_once_and_then_truncated():
    e = episode()
    respond(e, 9, 9, 9, 9, 9, finish="length")
    assert call(e).state == {"answer": "c", RESPONSE_TRUNCATED: True}
    e.apply_env_step(replace(GO_ON, rewards={"correct": 0.5}))
    assert e.action is None
    trajectory = e.trajectory()
    assert trajectory.stop_reason is StopReason.TRUNCATED
    assert trajectory.rewards == {"correct": 0.5}
    assert trajectory.num_turns == 1


def test_cut_response_is_truncated_even_where_the_environment_is_done():
    e = episode()
    respond(e, 9, 9, 9, 9, 9, finish="length")
    e.apply_env_step(EnvStep(rewards={"correct": 1.0}, done=True))
    assert e.trajectory().stop_reason is StopReason.TRUNCATED


def test_stop_strings_of_a_turn_are_cleared_by_none():
    e = episode()
    assert generation(e).sampling.stop_strings == ("stop",)
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, stop_strings=("</tool>",)))
    assert generation(e).sampling.stop_strings == ("</tool>",)
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, stop_strings=None))
    assert generation(e).sampling.stop_strings == ("stop",)


def test_response_faults_of_all_turns_are_kept_once_and_the_rewards_stand():
    e = episode()
    for fault in ("tool_error", None, "tool_error"):
        respond(e, 9, END)
        e.apply_env_step(replace(GO_ON, response_fault=fault, rewards={"correct": 0.5}))
    trajectory = e.trajectory()
    assert trajectory.response_faults == ("tool_error",)
    assert (trajectory.failure, trajectory.reward) == (None, 1.5)


def truncated_episode(reward: float | None, **changes: Any) -> Episode:
    return episode(replace(RULES, truncated_rewards={"game": reward}, **changes))


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_rollout_that_is_cut_off_before_any_reward_has_the_stated_one(finish: str):
    e = truncated_episode(-0.5, max_turns=1)
    respond(e, 9, END, finish=finish)
    e.apply_env_step(GO_ON)
    trajectory = e.trajectory()
    assert trajectory.stop_reason is (StopReason.MAX_TURNS if finish == "stop" else StopReason.TRUNCATED)
    assert trajectory.rewards == {"game": -0.5}
    assert trajectory.response_faults == (TRUNCATED_BEFORE_REWARD,)


def test_observation_without_room_before_any_reward_is_such_a_cut():
    e = truncated_episode(0.25, max_total_length=9)
    respond(e, 9, END)
    e.apply_env_step(GO_ON)
    assert (e.trajectory().stop_reason, e.trajectory().rewards) == (StopReason.TRUNCATED, {"game": 0.25})


def test_rollout_that_is_cut_off_without_a_stated_reward_has_none():
    e = truncated_episode(None, max_turns=1)
    respond(e, 9, END)
    e.apply_env_step(GO_ON)
    cause = "cut off by a limit before any reward, and env.game.truncated_reward is null"
    assert e.trajectory().failure == Failure(FailureClass.TRUNCATED, cause)
    assert e.trajectory().rewards == {}


def test_rewards_that_the_environment_gave_stand_when_the_rollout_is_cut_off():
    for reward in (1.0, 0.0):
        e = truncated_episode(None, max_turns=2)
        respond(e, 9, END)
        e.apply_env_step(replace(GO_ON, rewards={"correct": reward}))
        respond(e, 9, END)
        e.apply_env_step(GO_ON)
        assert e.trajectory().rewards == {"correct": reward}
        assert e.trajectory().response_faults == ()


def test_half_a_surrogate_pair_reaches_no_tokenizer():
    class Utf8Encoder(FakeEncoder):
        def encode_turn(self, message_log, messages, tools=()):
            for message in messages:
                message.content.encode()
            return super().encode_turn(message_log, [Message("user", "cd")], tools)

    encoder = Utf8Encoder()
    e = Episode(RolloutJob(PROMPT, "g", 1), encode_prompt(PROMPT, encoder), encoder, RULES)
    request = generation(e)
    e.apply_response(Completion(request.request_id, (9,), (-0.5,), "stop", text="a\udc00b"))
    assert call(e).conversation[-1].content == "a\ufffdb"
    e.apply_env_step(EnvStep(observation=(Message("tool", "\ud800", tool_call_id="c"),), done=False))
    respond(e, 9)
    assert call(e).conversation[-2].content == "\ufffd"


def test_done_is_what_the_environment_ended():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(EnvStep(rewards={"correct": 1.0}, done=True, answer="h"))
    trajectory = e.trajectory()
    assert (trajectory.stop_reason, trajectory.answer, trajectory.reward) == (StopReason.DONE, "h", 1.0)


def test_max_turns_is_what_still_goes_on_after_the_last_turn():
    e = episode()
    for _ in range(3):
        respond(e, 9, END)
        e.apply_env_step(GO_ON)
    trajectory = e.trajectory()
    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.MAX_TURNS, 3)


def test_done_in_the_last_turn_is_done():
    e = episode(replace(RULES, max_turns=1))
    respond(e, 9, END)
    e.apply_env_step(EnvStep(done=True))
    assert e.trajectory().stop_reason is StopReason.DONE


def test_last_observation_keeps_its_text_without_tokens():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(EnvStep(observation=(Message("user", "well done"),), done=True))
    assert e.trajectory().message_log[-1] == TokenizedMessage(Message("user", "well done"), ())


def test_failed_generation_has_no_reward_even_after_rewarded_turns():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, rewards={"correct": 1.0}))
    failure = Failure(FailureClass.INFRA, "engine died")
    e.apply_response(failure)
    trajectory = e.trajectory()
    assert (trajectory.stop_reason, trajectory.failure, dict(trajectory.rewards)) == (StopReason.FAILED, failure, {})
    assert trajectory.num_turns == 1


def test_failure_of_an_item_is_kept_as_the_environment_named_it():
    e = episode()
    respond(e, 9, END)
    failure = Failure(FailureClass.AGENT, "the tool call was no JSON")
    e.apply_env_step(failure)
    assert e.trajectory().failure == failure


def test_empty_observation_is_no_tokens_and_the_next_response_goes_on():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(EnvStep(observation=(), done=False))
    assert generation(e).token_ids == (BEGIN, 2, 3, BEGIN, 9, END)
    assert len(e._message_log) == 2


def test_callers_messages_and_state_are_never_changed():
    messages, state = (Message("user", "ab"),), {"board": [1, 2]}
    prompt = Prompt("p", "game", messages, state)
    e = episode(prompt=prompt)
    respond(e, 9, END)
    first = call(e).conversation
    call(e).state["board"].append(3)  # as environments do that play on in place
    e.apply_env_step(replace(GO_ON, state={"board": 1}))
    respond(e, 9, END)
    assert (prompt.messages, state) == ((Message("user", "ab"),), {"board": [1, 2]})
    assert len(first) == 2
    assert len(call(e).conversation) == 4


def test_observation_without_room_is_cut_to_it_and_truncated():
    e = episode(replace(RULES, max_total_length=9))  # prompt 4, response 2: room for 3 of the observation's 4
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, rewards={"correct": 1.0}))
    trajectory = e.trajectory()
    assert trajectory.stop_reason is StopReason.TRUNCATED
    assert trajectory.message_log[-1].token_ids == (BEGIN, 4, 5)
    assert trajectory.reward == 1.0


def test_observation_that_fills_the_room_leaves_none_for_a_token():
    e = episode(replace(RULES, max_total_length=10))
    respond(e, 9, END)
    e.apply_env_step(GO_ON)
    assert e.trajectory().stop_reason is StopReason.TRUNCATED
    assert e.trajectory().num_tokens == 10
    e = episode(replace(RULES, max_total_length=11))
    respond(e, 9, END)
    e.apply_env_step(GO_ON)
    assert generation(e).sampling.max_new_tokens == 1


def test_response_that_fills_the_room_leaves_none_even_for_an_empty_observation():
    e = episode(replace(RULES, max_total_length=6))
    respond(e, 9, END)
    e.apply_env_step(EnvStep(done=False))
    assert e.trajectory().stop_reason is StopReason.TRUNCATED


def test_prompt_without_room_fails_before_anything_is_asked():
    e = episode(replace(RULES, max_total_length=4))
    assert e.action is None
    assert e.trajectory().stop_reason is StopReason.FAILED


def test_new_tokens_are_limited_to_the_room():
    assert generation(episode(replace(RULES, max_total_length=7))).sampling.max_new_tokens == 3
    assert generation(episode(replace(RULES, max_total_length=90))).sampling.max_new_tokens == 5


def test_environment_sees_role_and_content_alone():
    asked = Message("assistant", "x", (ToolCall("1", "add", "{}"),))
    answered = Message("tool", "3", tool_call_id="1")
    e = episode(prompt=replace(PROMPT, messages=(asked, answered)))
    respond(e, 9, END)
    assert call(e).conversation == (Message("assistant", "x"), Message("tool", "3"), Message("assistant", "h"))


def test_rewards_add_up_over_turns_by_name():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, rewards={"format": 0.25, "moves": -1.0}))
    respond(e, 9, END)
    e.apply_env_step(EnvStep(rewards={"format": 0.5, "correct": 2.0}))
    trajectory = e.trajectory()
    assert trajectory.rewards == {"format": 0.75, "moves": -1.0, "correct": 2.0}
    assert trajectory.reward == 1.75


def test_state_is_handed_back_without_the_flag_of_the_rollout():
    e = episode()
    respond(e, 9, END)
    e.apply_env_step(replace(GO_ON, state={"board": 3, RESPONSE_TRUNCATED: True}))
    respond(e, 9, END)
    assert call(e).state == {"board": 3, RESPONSE_TRUNCATED: False}


def test_weight_versions_span_all_turns():
    e = episode()
    respond(e, 9, END, versions=(3, 4))
    e.apply_env_step(GO_ON)
    respond(e, 9, END, versions=(4, 6))
    e.apply_env_step(EnvStep())
    assert e.trajectory().weight_versions == (3, 6)


def test_message_that_an_update_cut_keeps_the_spans():
    e = episode()
    spans = (WeightSpan(3, 0, 1), WeightSpan(5, 1, 2))
    e.apply_response(Completion("g:1:0", (9, END), (-1.0, -1.0), "stop", (3, 5), spans))
    e.apply_env_step(GO_ON)
    respond(e, 9, END, versions=(5, 5))
    e.apply_env_step(EnvStep())
    assert [m.weight_spans for m in e.trajectory().message_log if m.is_generated] == [spans, ()]


@pytest.mark.parametrize("spans", [((3, 0, 1),), ((3, 0, 1), (4, 0, 2)), ((3, 1, 2),), ((3, 0, 1), (4, 1, 3))])
def test_weight_spans_with_gaps_are_an_infra_failure(spans):
    e = episode()
    weight_spans = tuple(WeightSpan(*span) for span in spans)
    e.apply_response(Completion("g:1:0", (9, END), (-1.0, -1.0), "stop", (3, 4), weight_spans))
    failure = e.trajectory().failure
    assert failure is not None
    assert failure.failure_class is FailureClass.INFRA


def test_engine_that_breaks_its_contract_is_an_infra_failure():
    for token_ids, logprobs in [((9, 9), (-1.0,)), ((9,) * 6, (-1.0,) * 6)]:
        e = episode()
        e.apply_response(Completion("g:1:0", token_ids, logprobs, "stop"))
        failure = e.trajectory().failure
        assert failure is not None
        assert failure.failure_class is FailureClass.INFRA


def test_log_probs_that_are_nan_are_an_infra_failure_unless_a_server_gave_text_alone():
    nan = float("nan")
    e = episode()
    e.apply_response(Completion("g:1:0", (9, END), (-1.0, nan), "stop"))
    failure = e.trajectory().failure
    assert failure is not None
    assert (failure.failure_class, failure.cause) == (
        FailureClass.INFRA,
        "the engine gave 1 of 2 log-probs as NaN",
    )
    e = episode()
    e.apply_response(Completion("g:1:0", (-1, -1), (nan, nan), "stop", text="9"))
    e.apply_env_step(EnvStep())
    assert e.trajectory().failure is None


class BrokenTemplate(FakeEncoder):
    def encode_prompt(self, messages, tools=()):
        raise ValueError("roles must alternate\nline 2")

    def encode_turn(self, message_log, new_messages, tools=()):
        raise ValueError("roles must alternate\nline 2")


def test_messages_that_the_template_refuses_are_environment_failures():
    broken, job = BrokenTemplate(), RolloutJob(PROMPT, "g", 0)
    at_start = Episode(job, encode_prompt(PROMPT, broken), broken, RULES)
    later = Episode(job, encode_prompt(PROMPT, FakeEncoder()), broken, RULES)
    respond(later, 9, END)
    later.apply_env_step(GO_ON)
    for failed in (at_start, later):
        failure = failed.trajectory().failure
        assert failure is not None
        assert failure.failure_class is FailureClass.ENVIRONMENT
        assert failure.cause.endswith("ValueError: roles must alternate")


def test_timings_add_up_over_turns():
    e = episode()
    e.apply_response(Completion("g:1:0", (9, END), (-1.0, -1.0), "stop"), seconds=0.5)
    e.apply_env_step(GO_ON, seconds=0.25)
    e.apply_response(Completion("g:1:1", (9, END), (-1.0, -1.0), "stop"), seconds=0.5)
    e.apply_env_step(EnvStep(), seconds=0.25)
    timings = e.trajectory(total_s=2.0).timings
    assert (timings.generation_s, timings.environment_s, timings.total_s) == (1.0, 0.5, 2.0)
