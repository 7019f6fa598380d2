"""Agents against a real gateway: from their calls to trajectories, and what their mistakes cost."""

import asyncio
import json
import os
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

from nemo_rl.config.run import GatewayConfig, RolloutConfig
from nemo_rl.data.prompts import PromptLoader
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED
from nemo_rl.errors import RolloutError
from nemo_rl.experience.agent_rollouts import run_agent_rollouts
from nemo_rl.experience.agents import AgentRuntime, CommandAgent, FunctionAgent, IsolatedFunctionAgent
from nemo_rl.experience.assembly import make_training_samples
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutJob, RolloutOptions, run_async_multi_turn_rollout
from nemo_rl.experience.sources import SyncSource, run_rollouts
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.interfaces import Agent
from nemo_rl.types import (
    AgentResult,
    EnvStep,
    Failure,
    FailureClass,
    GenerationRequest,
    Prompt,
    StopReason,
    Trajectory,
)
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


def post_reward(base_url: str, body: Mapping[str, Any]) -> None:
    """As a harness would that knows the gateway's reward address."""
    address = base_url.removesuffix("/v1") + "/reward"
    headers = {"Content-Type": "application/json"}
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

    trajectory = rollout_of(agent, scorer=FakeEnvironment())
    assert trajectory.rewards == rewards
    assert trajectory.answer == ("four" if isinstance(returned, AgentResult) else None)


def test_rewards_of_single_calls_reach_the_samples_of_their_chains() -> None:
    def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        with OpenAI(base_url=base_url, api_key=api_key, timeout=DEADLINE_S) as client:
            for question, reward in (("one", 1), ("another", 0)):
                done = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
                post_reward(base_url, {"reward": reward, "completion_id": done.id})

    trajectory = rollout_of(agent, scorer=FakeEnvironment(), trajectory_selection="all")
    samples = make_training_samples(trajectory, trajectory_id=0, group_id=0, reward=trajectory.reward)
    questions = [log[0].message.content for log in trajectory.chains]
    assert dict(zip(questions, [sample.reward for sample in samples], strict=True)) == {"one": 1.0, "another": 0.0}
    assert trajectory.rewards == {"reward": 0.5}


def test_a_posted_reward_counts_before_the_scorers() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        await ask(prompt, base_url, api_key)
        await asyncio.to_thread(post_reward, base_url, {"rewards": {"posted": 3}})

    assert rollout_of(agent, scorer=FakeEnvironment()).rewards == {"posted": 3.0}


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


def test_an_agent_that_runs_out_of_room_unrewarded_has_failed() -> None:
    expected = (FailureClass.AGENT, "the agent ran out of room and gave no reward")
    assert cause_of(rollout_of(talk_for_ever, max_model_len=300)) == expected


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

CALL = """
import json, os, sys, urllib.request
asked = json.load(sys.stdin)
body = json.dumps({"model": "any", "messages": asked["messages"]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
said = json.load(opener.open(request))["choices"][0]["message"]["content"]
print("it said", said)
"""


def command(script: str) -> CommandAgent:
    return CommandAgent("game", [sys.executable, "-S", "-c", script])


@pytest.mark.parametrize(
    ("last_line", "rewards"),
    [
        ('print(json.dumps({"reward": 2, "answer": asked["env_state"]["number"]}))', {"game": 2.0}),
        ('print(json.dumps({"rewards": {"a": 1, "b": 2}, "answer": 0}) + "\\n")', {"a": 1.0, "b": 2.0}),
    ],
)
def test_a_command_reads_the_prompt_and_says_its_reward_last(last_line: str, rewards: dict[str, float]) -> None:
    trajectory = rollout_of(command(CALL + last_line))
    assert (trajectory.failure, trajectory.rewards, trajectory.answer) == (None, rewards, "0")
    assert [m.message.content for m in trajectory.message_log] == ["question0", "hello"]


@pytest.mark.parametrize("last_line", ["", "print('{broken')", "print([1])"])
def test_a_command_without_a_reward_is_scored_by_the_environment(last_line: str) -> None:
    assert rollout_of(command(CALL + last_line), scorer=FakeEnvironment()).rewards == {"length": 5.0}


def test_a_command_that_fails_says_why() -> None:
    failure_class, cause = cause_of(rollout_of(command("import sys; print('why', file=sys.stderr); sys.exit(7)")))
    assert failure_class is FailureClass.AGENT
    assert cause == "CommandError: exit status 7: why"
    failed = cause_of(rollout_of(CommandAgent("game", ["/no/such/program"])))
    assert failed[0] is FailureClass.AGENT
    assert "/no/such/program" in failed[1]


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

    use(IsolatedFunctionAgent("game", "tests.unit.experience.agent_functions:where_it_runs"), body)
