"""Agents against a real gateway: from their calls to trajectories, and what their mistakes cost."""

import ast
import asyncio
import json
import os
import shutil
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from nemo_rl.config.shared_sections import GatewayConfig, RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED
from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.experience.agent_rollouts import run_agent_rollouts
from nemo_rl.experience.agent_runtime import AgentRuntime, RewardRange, make_agent
from nemo_rl.experience.agents import AgentConfig
from nemo_rl.experience.assembly import make_training_samples
from nemo_rl.experience.command_agent import CommandAgent
from nemo_rl.experience.function_agent import FunctionAgent, IsolatedFunctionAgent
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_rollouts
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.experience.turns import TRUNCATED_BEFORE_REWARD, RolloutJob
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.gateway.side_calls import make_side_call_test
from nemo_rl.interfaces import Agent
from nemo_rl.types import (
    AgentResult,
    EnvStep,
    Failure,
    FailureClass,
    GenerationRequest,
    Message,
    Prompt,
    StopReason,
    Trajectory,
)
from tests.fakes.agent_programs import ASK
from tests.fakes.environments import FakeEnvironment
from tests.unit.experience.rollout_setup import LIMITS, check_environment, jobs, prompt
from tests.unit.gateway.engines import DEADLINE_S, SpeakingGeneration, codec_of, encoder_of, rules, tokens_of

Say = Callable[[GenerationRequest, str], str | None]


def hello(request: GenerationRequest, text: str) -> str:
    return "hello"


@dataclass
class Setup:
    """A running gateway and the dependencies of its rollouts."""

    manager: GatewayManager
    generation: SpeakingGeneration
    dependencies: RolloutDependencies
    options: RolloutOptions

    def run(self, the_jobs: Sequence[RolloutJob]) -> Awaitable[tuple[Trajectory, ...]]:
        return run_agent_rollouts(the_jobs, self.dependencies, self.options)


def use(
    agent: Agent | Callable[..., Any],
    body: Callable[[Setup], Awaitable[None]],
    *,
    say: Say = hello,
    scorer: FakeEnvironment | None = None,
    max_new_tokens: int = 256,
    max_model_len: int = 4096,
    stall_timeout_s: float = DEADLINE_S,
    **runtime: Any,
) -> None:
    """Run `body` with the agent as task "game"; whatever happened, no session may be left."""

    async def main() -> None:
        generation = SpeakingGeneration("chatml", say)
        the_rules = rules(max_new_tokens=max_new_tokens, max_model_len=max_model_len)
        manager = await GatewayManager.start(generation, codec_of("chatml"), the_rules, GatewayConfig())
        made = agent if hasattr(agent, "run") else FunctionAgent("game", agent)  # type: ignore[arg-type]
        settings = {"timeout_s": DEADLINE_S, "max_concurrency": 64, "scored_by": "scorer" if scorer else None} | runtime
        dependencies = RolloutDependencies(
            generation,
            {"scorer": check_environment(scorer or FakeEnvironment())},
            encoder_of("chatml"),
            replace(LIMITS, max_total_length=max_model_len, stall_timeout_s=stall_timeout_s),
            agents={"game": AgentRuntime(made, manager, **settings)},  # type: ignore[arg-type]
        )
        options = RolloutOptions(the_rules.sampling, seed=7)
        try:
            await asyncio.wait_for(body(Setup(manager, generation, dependencies, options)), DEADLINE_S)
            assert manager.num_sessions == (0,)
        finally:
            await manager.close()

    asyncio.run(main())


def rollouts_of(agent: Agent | Callable[..., Any], count: int = 1, **how: Any) -> tuple[Trajectory, ...]:
    """What the agent's rollouts of one prompt came to."""
    seen: list[Trajectory] = []

    async def body(setup: Setup) -> None:
        seen.extend(await setup.run(jobs(1, count)))

    use(agent, body, **how)
    return tuple(seen)


def rollout_of(agent: Agent | Callable[..., Any], **how: Any) -> Trajectory:
    (trajectory,) = rollouts_of(agent, **how)
    return trajectory


async def chat(base_url: str, api_key: str, *turns: str | list[Any]) -> list[Any]:
    """Ask turn by turn, appending; a list in place of a text begins a history of its own."""
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=DEADLINE_S) as client:
        for turn in turns:
            messages = [*turn] if isinstance(turn, list) else [*messages, {"role": "user", "content": turn}]
            done = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": done.choices[0].message.content})
    return messages


async def ask(prompt: Prompt, base_url: str, api_key: str) -> None:
    await chat(base_url, api_key, prompt.messages[0].content)


async def ask_for_one(prompt: Prompt, base_url: str, api_key: str) -> float:
    await ask(prompt, base_url, api_key)
    return 1.0


def post_reward(base_url: str, key: str, body: Mapping[str, Any]) -> None:
    """As a grader would that holds the run's key."""
    address = base_url.removesuffix("/v1") + "/reward"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=DEADLINE_S).close()


def sampled(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [message.token_ids for message in trajectory.message_log if message.is_generated]


def cause_of(trajectory: Trajectory) -> tuple[FailureClass, str]:
    assert trajectory.failure is not None
    return trajectory.failure.failure_class, trajectory.failure.cause


# ---- what a run becomes


def test_one_turn_is_scored_by_the_environment_and_holds_the_sampled_tokens() -> None:
    scorer = FakeEnvironment()
    trajectory = rollout_of(ask, scorer=scorer)
    assert sampled(trajectory) == [tokens_of("chatml", "hello")]
    assert trajectory.message_log[1].generation_logprobs == (-0.25,) * 6
    assert (trajectory.stop_reason, trajectory.rewards, trajectory.num_turns) == (StopReason.DONE, {"length": 5.0}, 1)
    assert (trajectory.weight_versions, trajectory.other_chains) == ((3, 4), ())
    ((conversations, states),) = scorer.calls
    assert [(m.role, m.content) for m in conversations[0]] == [("user", "question0"), ("assistant", "hello")]
    assert states == [{"number": 0, RESPONSE_TRUNCATED: False}]


async def rewrite(prompt: Prompt, base_url: str, api_key: str) -> dict[str, float]:
    """Two turns, then a history that says something else."""
    history = await chat(base_url, api_key, "one", "two")
    await chat(base_url, api_key, [{"role": "user", "content": "s"}, history[-1], {"role": "user", "content": "x"}])
    return {"a": 0.5, "b": 0.25}


@pytest.mark.parametrize(("selection", "num_others"), [("all", 1), ("longest", 0)])
def test_a_rewritten_history_is_a_further_chain(selection: str, num_others: int) -> None:
    trajectory = rollout_of(rewrite, trajectory_selection=selection)
    assert [len(sampled(trajectory)), trajectory.num_turns, len(trajectory.other_chains)] == [2, 2, num_others]
    assert [m.message.content for m in trajectory.message_log] == ["one", "hello", "two", "hello"]
    assert trajectory.reward == 0.75


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [(2, {"game": 2.0}), ({"x": True}, {"x": 1.0}), (AgentResult({"y": 0.5}, "four"), {"y": 0.5})],
)
def test_a_reward_is_a_number_or_numbers_by_name_or_a_result(returned: Any, rewards: dict[str, float]) -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> Any:
        with OpenAI(base_url=base_url, api_key=api_key, timeout=DEADLINE_S) as client:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        return returned

    trajectory = rollout_of(agent)
    assert trajectory.rewards == rewards
    assert trajectory.answer == ("four" if isinstance(returned, AgentResult) else None)


def reward_two_calls(prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
    rewards = {}
    with OpenAI(base_url=base_url, api_key=api_key, timeout=DEADLINE_S) as client:
        for question, reward in (("one", 1), ("another", 0)):
            done = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
            rewards[done.id] = {"reward": reward}
    return AgentResult(call_rewards=rewards)


def test_rewards_of_single_calls_reach_the_samples_of_their_chains() -> None:
    trajectory = rollout_of(reward_two_calls, trajectory_selection="all")
    samples = make_training_samples(trajectory, trajectory_id=0, group_id=0, reward=trajectory.reward)
    questions = [log[0].message.content for log in trajectory.chains]
    assert dict(zip(questions, [sample.reward for sample in samples], strict=True)) == {"one": 1.0, "another": 0.0}
    assert trajectory.rewards == {"reward": 0.5}


def test_a_reward_posted_with_the_runs_key_counts_if_the_agent_gives_none() -> None:
    async def body(setup: Setup) -> None:
        async def agent(prompt: Prompt, base_url: str, api_key: str) -> float | None:
            await ask(prompt, base_url, api_key)
            await asyncio.to_thread(post_reward, base_url, setup.manager.api_key, {"rewards": {"posted": 3}})
            return None if prompt.prompt_id == "p0" else 1.0

        runtime = replace(setup.dependencies.agents["game"], agent=FunctionAgent("game", agent))
        dependencies = replace(setup.dependencies, agents={"game": runtime})
        trajectories = await run_agent_rollouts(jobs(2), dependencies, setup.options)
        assert [trajectory.rewards for trajectory in trajectories] == [{"posted": 3.0}, {"game": 1.0}]

    use(ask, body)


@pytest.mark.parametrize("agent", [ask_for_one, reward_two_calls])
def test_with_a_scoring_environment_no_other_reward_counts(
    agent: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trajectories = rollouts_of(agent, 2, scorer=FakeEnvironment(), trajectory_selection="all")
    assert [trajectory.rewards for trajectory in trajectories] == [{"length": 5.0}] * 2
    assert [trajectory.chain_rewards for trajectory in trajectories] == [()] * 2
    assert caplog.text.count("of an agent: only env.game.scored_by rewards it") == 1


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (100.5, "reward 'game' is 100.5, not between env.game.reward_min = -100 and env.game.reward_max = 100"),
        (-1e300, "reward 'game' is -1e+300, not between"),
        (10**400, "reward 'game' is 1000"),
        ({"a": 60, "b": 60}, "the sum of 2 rewards is 120.0, not between"),
        (AgentResult(rewards=1.0), "rewards are 1.0, not numbers by name"),  # type: ignore[arg-type]
        (AgentResult(call_rewards={"no-such-id": {"a": 1}}), "call_rewards: no completion 'no-such-id'"),
        (AgentResult(call_rewards={"x": {"a": 1e300}}), "reward 'a' is 1e+300, not between"),
        (AgentResult(call_rewards=[1]), "call_rewards are [1], not rewards by completion id"),  # type: ignore[arg-type]
    ],
)
def test_a_reward_out_of_range_fails_the_rollout_and_is_never_clamped(result: Any, cause: str) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> Any:
        await ask(prompt, base_url, api_key)
        return result

    failure_class, said = cause_of(rollout_of(agent, reward_range=RewardRange("env.game")))
    assert failure_class is FailureClass.REWARD
    assert said.startswith(cause)


def test_a_fault_of_the_response_is_counted_beside_its_reward() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        await ask(prompt, base_url, api_key)
        return AgentResult({"game": 0.0}, response_fault=faults.pop(0))

    faults = ["broke_its_tool", "Not A Name"]
    assert rollout_of(agent).response_faults == ("broke_its_tool",)
    assert "response_fault is 'Not A Name'" in cause_of(rollout_of(agent))[1]


def test_a_response_cut_by_its_limit_truncates_the_rollout_and_its_scorer_is_told() -> None:
    scorer = FakeEnvironment()
    trajectory = rollout_of(ask, scorer=scorer, max_new_tokens=3)
    assert trajectory.stop_reason is StopReason.TRUNCATED
    assert scorer.calls[0][1][0][RESPONSE_TRUNCATED] is True


async def talk_for_ever(prompt: Prompt, base_url: str, api_key: str) -> None:
    await chat(base_url, api_key, *["and again?"] * 1000)


def test_an_agent_that_runs_out_of_room_is_truncated_and_scored() -> None:
    trajectory = rollout_of(talk_for_ever, scorer=FakeEnvironment(), max_model_len=300)
    assert (trajectory.stop_reason, trajectory.rewards) == (StopReason.TRUNCATED, {"length": 5.0})
    assert trajectory.num_turns > 1
    assert trajectory.num_tokens <= 300


def test_an_agent_that_runs_out_of_room_unrewarded_has_the_reward_of_a_truncated_rollout() -> None:
    trajectory = rollout_of(talk_for_ever, max_model_len=300)
    assert (trajectory.stop_reason, trajectory.rewards) == (StopReason.TRUNCATED, {"game": 0.0})
    assert trajectory.response_faults == (TRUNCATED_BEFORE_REWARD,)


def test_prompts_are_copies_and_rollouts_of_a_group_draw_with_seeds_of_their_own() -> None:
    seen: list[Any] = []

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        seen.append(dict(prompt.env_state))
        prompt.env_state["number"] = "changed"  # type: ignore[index]
        return await ask_for_one(prompt, base_url, api_key)

    async def body(setup: Setup) -> None:
        for _ in range(2):
            await setup.run(jobs(1, 2))
        seeds = [request.seed for request in setup.generation.requests]
        assert len(set(seeds)) == 2
        assert sorted(seeds[:2]) == sorted(seeds[2:])

    use(agent, body)
    assert seen == [{"number": 0}] * 4


# ---- failures


def refuse(request: GenerationRequest, text: str) -> None:
    return None


async def crash(prompt: Prompt, base_url: str, api_key: str) -> float:
    await ask(prompt, base_url, api_key)
    raise ValueError("the agent's own\nsecond line")


async def leave(prompt: Prompt, base_url: str, api_key: str) -> float:
    sys.exit(3)


def leave_from_a_thread(prompt: Prompt, base_url: str, api_key: str) -> float:
    sys.exit(3)


async def cancel_itself(prompt: Prompt, base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


async def call_nobody(prompt: Prompt, base_url: str, api_key: str) -> float:
    return 1.0


async def ask_for_nan(prompt: Prompt, base_url: str, api_key: str) -> float:
    await ask(prompt, base_url, api_key)
    return float("nan")


async def wrap_errors(prompt: Prompt, base_url: str, api_key: str) -> None:
    """As frameworks do."""
    try:
        await ask(prompt, base_url, api_key)
    except Exception as error:
        raise RuntimeError("a step of mine failed") from error


async def hide_errors(prompt: Prompt, base_url: str, api_key: str) -> None:
    try:
        await ask(prompt, base_url, api_key)
    except Exception:
        raise RuntimeError("a step of mine failed") from None


async def quote_the_gateway(prompt: Prompt, base_url: str, api_key: str) -> None:
    await ask(prompt, base_url, api_key)
    raise ValueError("the engine failed: no room is left for a response")


async def hang(prompt: Prompt, base_url: str, api_key: str) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("agent", "how", "failure_class", "said"),
    [
        (crash, {}, FailureClass.AGENT, "ValueError: the agent's own"),
        (leave, {}, FailureClass.AGENT, "UserExitError: user code raised SystemExit(3), which ends no run"),
        (leave_from_a_thread, {}, FailureClass.AGENT, "SystemExit(3)"),
        (cancel_itself, {}, FailureClass.AGENT, "cancelled from within"),
        (call_nobody, {}, FailureClass.AGENT, "without a model call"),
        (hang, {"timeout_s": 0.01}, FailureClass.AGENT, "did not end in 0.01 s"),
        (ask, {"say": refuse}, FailureClass.INFRA, "it was made to fail"),
        (wrap_errors, {"say": refuse}, FailureClass.INFRA, "a step of mine failed"),
        (hide_errors, {"say": refuse}, FailureClass.INFRA, "a step of mine failed"),
        (quote_the_gateway, {}, FailureClass.AGENT, "the engine failed"),
        (ask, {}, FailureClass.REWARD, "env.game.scored_by"),
        (ask_for_nan, {}, FailureClass.REWARD, "reward 'game' is nan, not a finite number"),
    ],
)
def test_what_goes_wrong_is_a_failure_of_its_class(
    agent: Callable[..., Any], how: dict[str, Any], failure_class: FailureClass, said: str
) -> None:
    trajectory = rollout_of(agent, **how)
    assert trajectory.stop_reason is StopReason.FAILED
    assert cause_of(trajectory)[0] is failure_class
    assert said in cause_of(trajectory)[1]
    assert "\n" not in cause_of(trajectory)[1]


def test_what_an_agent_sampled_before_it_crashed_is_kept_to_be_looked_at() -> None:
    trajectory = rollout_of(crash)
    assert [m.message.content for m in trajectory.message_log] == ["question0", "hello"]
    assert [m.message.content for m in rollout_of(call_nobody).message_log] == ["question0"]


def test_a_scorer_that_fails_fails_the_rollout() -> None:
    verdicts = (Failure(FailureClass.REWARD, "unreadable"), EnvStep(rewards={"x": float("inf")}))
    classes = [cause_of(rollout_of(ask, scorer=FakeEnvironment(lambda c, s, v=v: v)))[0] for v in verdicts]
    assert classes == [FailureClass.REWARD, FailureClass.REWARD]
    trajectory = rollout_of(ask, scorer=FakeEnvironment(lambda c, s: "no step"))  # type: ignore[arg-type,return-value]
    assert cause_of(trajectory)[0] is FailureClass.ENVIRONMENT


def test_a_session_that_has_expired_is_a_failure_of_the_gateway() -> None:
    async def body(setup: Setup) -> None:
        async def close_early(prompt: Prompt, base_url: str, api_key: str) -> float:
            (handle,) = handles
            await setup.manager.abandon(handle)
            return 1.0

        handles: list[Any] = []
        open_session = setup.manager.open_session
        setup.manager.open_session = lambda **how: handles.append(open_session(**how)) or handles[-1]  # type: ignore
        runtime = replace(setup.dependencies.agents["game"], agent=FunctionAgent("game", close_early))
        (trajectory,) = await run_agent_rollouts(
            jobs(1), replace(setup.dependencies, agents={"game": runtime}), setup.options
        )
        assert cause_of(trajectory)[0] is FailureClass.INFRA

    use(ask, body)


def test_survivors_of_a_group_are_kept_where_others_fail() -> None:
    numbers = iter(range(100))

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        return await (crash if next(numbers) in (1, 2) else ask_for_one)(prompt, base_url, api_key)

    async def body(setup: Setup) -> None:
        loader = PromptLoader([prompt(0)], shuffle=False, seed=0, max_epochs=1)
        source = SyncSource(
            loader,
            setup.dependencies,
            setup.options,
            num_prompts_per_step=1,
            num_generations_per_prompt=4,
            failures=RolloutConfig(),
        )
        collected = await source.next_groups(0)
        (group,) = collected.groups
        assert [t.generation_index for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.reward for t in group.survivors] == [1.0, 1.0]
        assert collected.metrics["failures/agent"] == 2

    use(agent, body)


# ---- many at once


def test_no_more_agents_run_at_once_than_allowed() -> None:
    running: list[int] = [0]
    most: list[int] = [0]

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await ask(prompt, base_url, api_key)
        running[0] -= 1
        return 1.0

    trajectories = rollouts_of(agent, 8, max_concurrency=2)
    assert [t.generation_index for t in trajectories] == list(range(8))
    assert most == [2]


def test_calls_that_overlap_share_an_agents_limit() -> None:
    running: list[int] = [0]
    most: list[int] = [0]

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await ask(prompt, base_url, api_key)
        running[0] -= 1
        return 1.0

    async def body(setup: Setup) -> None:
        validating = run_agent_rollouts(jobs(1, 4), setup.dependencies, replace(setup.options, trains=False))
        training, validation = await asyncio.gather(setup.run(jobs(1, 4)), validating)
        assert [t.failure for t in (*training, *validation)] == [None] * 8

    use(agent, body, max_concurrency=2)
    assert most == [2]


def test_agents_and_turns_run_at_once_with_results_in_the_order_of_the_jobs() -> None:
    async def body(setup: Setup) -> None:
        environments = {name: check_environment(FakeEnvironment()) for name in ("scorer", "plain")}
        dependencies = replace(setup.dependencies, environments=environments)
        seen: list[str] = []
        options = replace(setup.options, progress=lambda trajectory: seen.append(trajectory.prompt.prompt_id))
        the_jobs = jobs(5, 2, ("game", "plain"))
        trajectories = await run_rollouts(the_jobs, dependencies, options, run_async_multi_turn_rollout)
        assert [(t.prompt.prompt_id, t.generation_index) for t in trajectories] == [
            (job.prompt.prompt_id, job.generation_index) for job in the_jobs
        ]
        names = {"game": "game", "plain": "length"}
        assert all(t.rewards.keys() == {names[t.prompt.task_name]} for t in trajectories)
        assert sorted(seen) == sorted(job.prompt.prompt_id for job in the_jobs)

    use(ask_for_one, body)


def test_the_sampling_of_the_call_is_that_of_the_agents_calls() -> None:
    async def body(setup: Setup) -> None:
        greedy = replace(setup.options, sampling=replace(setup.options.sampling, temperature=0.0))
        await run_rollouts(jobs(1), setup.dependencies, greedy, run_async_multi_turn_rollout)
        await setup.run(jobs(1))
        assert [request.sampling.temperature for request in setup.generation.requests] == [0.0, 0.7]

    use(ask_for_one, body)


def test_agents_that_all_hang_are_a_stall_and_leave_no_session() -> None:
    async def body(setup: Setup) -> None:
        with pytest.raises(RolloutError, match=r"agent game \(3\)"):
            await setup.run(jobs(3))

    use(hang, body, stall_timeout_s=0.5)


def test_cancelled_rollouts_leave_no_session_and_no_agent() -> None:
    async def body(setup: Setup) -> None:
        ended: list[str] = []
        begun = asyncio.Event()

        async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("ended")

        runtime = replace(setup.dependencies.agents["game"], agent=FunctionAgent("game", agent))
        task = asyncio.ensure_future(
            run_agent_rollouts(jobs(1), replace(setup.dependencies, agents={"game": runtime}), setup.options)
        )
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["ended"]

    use(ask, body)


def test_a_blocking_agent_past_its_deadline_is_left_behind() -> None:
    release = threading.Event()

    def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        release.wait()

    try:
        assert cause_of(rollout_of(agent, timeout_s=0.01))[0] is FailureClass.AGENT
    finally:
        release.set()


# ---- commands

CALL = f'{ASK}print("it said", said)\n'


def command(script: str, **how: Any) -> CommandAgent:
    return CommandAgent("game", [sys.executable, "-S", "-c", script], **how)


@pytest.mark.parametrize(
    ("reports", "rewards"),
    [
        ('report(reward=2, answer=asked["env_state"]["number"])', {"game": 2.0}),
        ('report(reward=1); report(rewards={"a": 1, "b": 2}, answer=0)', {"a": 1.0, "b": 2.0}),
        ('report(answer=0, call_rewards={completion["id"]: {"turn": 0.5}})', {"turn": 0.5}),
    ],
)
def test_a_command_reads_the_prompt_and_reports_its_reward(reports: str, rewards: dict[str, float]) -> None:
    trajectory = rollout_of(command(CALL + reports))
    assert (trajectory.failure, trajectory.rewards, trajectory.answer) == (None, rewards, "0")
    assert [m.message.content for m in trajectory.message_log] == ["question0", "hello"]


def test_a_shell_script_reports_in_one_line() -> None:
    script = """
        asked=$(cat); key=$(jq -r .report_key <<< "$asked")
        body=$(jq -c '{model: "policy", messages: .messages}' <<< "$asked")
        curl -sf --noproxy '*' -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' \\
            -d "$body" "$OPENAI_BASE_URL/chat/completions" > /dev/null
        echo "{\\"report_key\\": \\"$key\\", \\"reward\\": 0.5}" >&"$NEMO_RL_REPORT_FD"
    """
    if shutil.which("jq") is None or shutil.which("curl") is None:
        pytest.skip("needs jq and curl")
    assert rollout_of(CommandAgent("game", ["bash", "-c", script])).rewards == {"game": 0.5}


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("report(reward=1e300)", "reward 'game' is 1e+300, not between"),
        ("report(reward=None)", "reward 'game' is None, not a finite number"),
        ("report(rewards=[1])", "rewards are [1], not numbers by name"),
        ('os.write(int(os.environ["NEMO_RL_REPORT_FD"]), asked["report_key"].encode() + b"{")', "is not JSON"),
    ],
)
def test_an_invalid_report_fails_the_rollout(report: str, cause: str) -> None:
    assert cause in cause_of(rollout_of(command(CALL + report)))[1]


def test_a_command_without_a_reward_is_scored_by_the_environment() -> None:
    assert rollout_of(command(CALL), scorer=FakeEnvironment()).rewards == {"length": 5.0}


def test_a_command_inherits_the_variables_that_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    monkeypatch.setenv("NAMED", "shown")
    agent = command(CALL + "report(reward=1, answer=sorted(os.environ))", inherited_variables=["NAMED", "UNSET"])
    seen = ast.literal_eval(rollout_of(agent).answer or "")
    own = {"NAMED", "OPENAI_API_KEY", "OPENAI_BASE_URL", "NEMO_RL_REPORT_FD", "NEMO_RL_AGENT_RUN"}
    assert own <= set(seen) <= own | {"PATH", "HOME", "LANG", "TMPDIR", "LC_CTYPE"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"number": 0}),
        ({"scored_by": "scorer"}, {}),
        ({"scorers": ["judge"]}, {}),
        ({"scored_by": "scorer", "env_state_fields": ["number", "unknown"]}, {"number": 0}),
    ],
)
def test_a_command_reads_the_row_unless_something_else_scores_it(
    section: dict[str, Any], expected: dict[str, int]
) -> None:
    script = CALL + "report(reward=1, answer=asked['env_state'])"
    agent = make_agent("game", AgentConfig(command=[sys.executable, "-S", "-c", script], **section))
    assert ast.literal_eval(rollout_of(agent).answer or "") == expected


def test_a_long_prompt_that_is_never_read_holds_nothing_up() -> None:
    async def main() -> None:
        long = replace(prompt(0), env_state={"text": "x" * 2**22})
        assert await command("").run(long, "http://unused", "unused") == AgentResult()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_command_that_fails_says_why() -> None:
    failure_class, cause = cause_of(rollout_of(command("import sys; print('why', file=sys.stderr); sys.exit(7)")))
    assert failure_class is FailureClass.AGENT
    assert cause == "CommandError: exit status 7: why"
    failed = cause_of(rollout_of(CommandAgent("game", ["/no/such/program"])))
    assert failed[0] is FailureClass.AGENT
    assert "/no/such/program" in failed[1]


# ---- harnesses as they come

# A program that knows no more than its arguments and the file that was written for it.
HARNESS = """
import json, os, sys, urllib.request
from pathlib import Path
settings = json.loads((Path.home() / ".harness" / "settings.json").read_text())
def ask(url, text, **fields):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}], **fields}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + settings["key"]}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()
"""
TITLED = """
ask(settings["url"], "a title for: " + sys.argv[1], model="small")
ask(settings["url"], sys.argv[1])
"""
SETTINGS = {"path": ".harness/settings.json", "content": {"url": "{base_url}", "key": "{api_key}"}}


def harness(script: str, **keys: Any) -> Agent:
    command = [sys.executable, "-S", "-c", HARNESS + script, "{prompt}", "{workdir}", "{prompt_file}"]
    return make_agent("game", config_of(command=command, files=[SETTINGS], scored_by="scorer", **keys))


def config_of(**keys: Any) -> AgentConfig:
    return AgentConfig.model_validate(keys)


def test_a_harness_gets_its_task_as_an_argument_and_is_scored_by_the_environment() -> None:
    script = """
assert Path.cwd() == Path(sys.argv[2]) != Path.home() and not os.listdir()
assert Path(sys.argv[3]).read_text() == sys.argv[1]
assert sys.stdin.read() == "" and "NEMO_RL_REPORT_FD" not in os.environ
(Path.cwd() / "left").write_text("removed afterwards")
ask(settings["url"], sys.argv[1])
"""
    trajectory = rollout_of(harness(script), scorer=FakeEnvironment())
    assert (trajectory.failure, trajectory.rewards) == (None, {"length": 5.0})
    assert [m.message.content for m in trajectory.message_log] == ["question0", "hello"]


def test_what_a_harness_leaves_behind_ends_and_is_removed(tmp_path: Path) -> None:
    script = f"""
import subprocess, tempfile
ask(settings["url"], "x")
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"], start_new_session=True)
left = tempfile.mkdtemp()
Path({str(tmp_path / "left")!r}).write_text(json.dumps([child.pid, left]))
"""
    assert rollout_of(harness(script), scorer=FakeEnvironment()).failure is None
    pid, left = json.loads((tmp_path / "left").read_text())
    assert not Path(left).exists()
    asyncio.run(asyncio.wait_for(eventually(lambda: not is_running(pid)), DEADLINE_S))


def test_a_harness_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="no such program") as caught:
        make_agent("game", AgentConfig(command=["no-such-harness", "{prompt}"]))
    assert caught.value.key == "env.game.command"


def test_a_harness_that_fails_says_why_even_on_standard_output() -> None:
    trajectory = rollout_of(harness("print('no such model'); sys.exit(3)"), scorer=FakeEnvironment())
    assert cause_of(trajectory) == (FailureClass.AGENT, "CommandError: exit status 3: no such model")


def test_the_longest_prompt_that_an_argument_can_be_arrives() -> None:
    long = replace(prompt(0), messages=(Message("user", "é" * 65_535),))
    command = ["/usr/bin/test", "{prompt}", "=", "é" * 65_535]
    agent = make_agent("game", AgentConfig(command=command, scored_by="scorer"))
    assert asyncio.run(agent.run(long, "http://unused", "unused")) == AgentResult()


@pytest.mark.parametrize(
    "rules", [[], [{"model": "^small$"}], [{"last_message": "never"}, {"last_message": "a title"}]]
)
def test_side_calls_are_answered_and_not_trained(rules: list[dict[str, str]]) -> None:
    agent = harness(TITLED)
    section = config_of(command=["h", "{prompt}"], side_calls=rules)
    scorer = FakeEnvironment()
    trajectory = rollout_of(agent, scorer=scorer, is_side_call=make_side_call_test(section.side_calls))
    assert trajectory.failure is None
    assert len(trajectory.other_chains) == (0 if rules else 1)
    if rules:
        assert [m.message.content for m in trajectory.message_log] == ["question0", "hello"]


FAILING = """
for text in json.loads(sys.argv[1]):
    try:
        ask(settings["url"], text)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("calls", "is_failed"),
    [
        (["x", "fail"], True),
        (["x", "fail", "a title"], True),
        (["x", "fail", "a title: fail"], True),
        (["fail", "x"], False),
        (["x", "a title: fail"], False),
    ],
)
def test_a_harness_whose_last_call_the_engine_failed_fails_though_it_exits_0(calls: list[str], is_failed: bool) -> None:
    asked_for = replace(prompt(0), messages=(Message("user", json.dumps(calls)),))
    job = replace(jobs(1, 1)[0], prompt=asked_for)
    seen: list[Trajectory] = []

    async def body(setup: Setup) -> None:
        seen.extend(await setup.run([job]))

    use(
        harness(FAILING),
        body,
        say=lambda _, text: None if "fail" in text else "hello",
        scorer=FakeEnvironment(),
        is_harness=True,
        is_side_call=make_side_call_test(config_of(command=["h"], side_calls=[{"last_message": "title"}]).side_calls),
    )
    (trajectory,) = seen
    assert (trajectory.failure is not None) == is_failed
    if is_failed:
        assert cause_of(trajectory)[0] is FailureClass.INFRA
        assert "the harness's last call failed" in cause_of(trajectory)[1]


def test_a_harness_that_makes_side_calls_alone_is_a_failure() -> None:
    test = make_side_call_test(config_of(command=["h"], side_calls=[{"tools": False}]).side_calls)
    trajectory = rollout_of(harness(TITLED), scorer=FakeEnvironment(), is_side_call=test)
    assert cause_of(trajectory) == (FailureClass.AGENT, "the agent ended without a model call that succeeded")


def spawning(directory: Path, then: str) -> CommandAgent:
    """A program with a child, whose id is in `child`; then it goes on with `then`."""
    return command(
        f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
with open({str(directory / "written")!r}, "w") as file:
    file.write(str(child.pid))
os.rename({str(directory / "written")!r}, {str(directory / "child")!r})
{then}
"""
    )


def is_running(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def eventually(claim: Callable[[], bool]) -> None:
    while not claim():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("then", ["child.wait()", ""])
def test_children_of_a_command_end_with_it_whether_it_is_stopped_or_ends(then: str, tmp_path: Path) -> None:
    child = tmp_path / "child"

    async def main() -> None:
        run = asyncio.ensure_future(spawning(tmp_path, then).run(prompt(0), "http://unused", "unused"))
        await eventually(child.exists)
        pid = int(child.read_text())
        if then:
            assert is_running(pid)
            run.cancel()
        await asyncio.wait((run,))
        assert run.cancelled() == bool(then)
        await eventually(lambda: not is_running(pid))

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


# ---- processes


def test_tasks_run_in_processes_of_their_own_whose_end_costs_one_rollout() -> None:
    async def body(setup: Setup) -> None:
        lived, died = await setup.run(jobs(2))
        assert lived.rewards["pid"] != os.getpid()
        assert cause_of(died)[0] is FailureClass.AGENT

    agent = IsolatedFunctionAgent("game", "tests.unit.experience.agent_functions:where_it_runs")
    use(agent, body, reward_range=RewardRange(high=1e9))
