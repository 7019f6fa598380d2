"""Real NeMo Gym before real vLLM: what its agents made the policy sample is what a policy computes, token for token."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.distributed.machine import unused_port
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.gateway import markup
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.types import Message, MessageLog, Prompt, SamplingParams, Trajectory
from tests.contracts.engines import MAX_MODEL_LEN, VOCAB_SIZE, exact_logprobs, tiny_model
from tests.contracts.real_gym import BLACKJACK, MCQA, POLICY_API_KEY, REASONING_GYM, TOOL_CALL, real_gym
from tests.contracts.test_weight_sync import published
from tests.templates import byte_tokenizer

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

TEMPERATURE = 0.7
WEIGHT_VERSION = 8
DEADLINE_S = 300.0
NUM_GENERATIONS = 3
KEY_VARIABLE = "KEY_OF_THE_RUN"
STOP_TOKENS = tuple(range(0, VOCAB_SIZE, 8))  # responses end by themselves: Gym ends a rollout whose response was cut

SPELL = "Spell this word backward (example: sun -> nus): cat"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def asking(*messages: tuple[str, str], **parameters: Any) -> dict[str, Any]:
    return {"input": [{"role": role, "content": content} for role, content in messages], **parameters}


ROWS: dict[str, dict[str, Any]] = {  # by agent
    REASONING_GYM: {
        "responses_create_params": asking(("user", SPELL), temperature=0.1),
        "question": SPELL,
        "answer": "tac",
        "metadata": {"source_dataset": "spell_backward", "word": "cat", "word_len": 3},
    },
    MCQA: {
        "responses_create_params": asking(("user", "Which letter? \\boxed{}\nA: one\nB: two")),
        "options": [{"A": "one"}, {"B": "two"}],
        "expected_answer": "B",
        "grading_mode": "strict_single_letter_boxed",
    },
    TOOL_CALL: {
        "responses_create_params": asking(
            ("developer", "You help."),
            ("user", "Is it warm?"),
            tools=[{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}],
        )
    },
    BLACKJACK: {"responses_create_params": asking(("system", "Play."), ("user", "Deal me in."))},
}


@pytest.fixture(autouse=True)
def key_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, POLICY_API_KEY)


@pytest.fixture(scope="module")
def gateway_port() -> int:
    return unused_port()


@pytest.fixture(scope="module")
def head_url(gateway_port: int) -> Iterator[str]:
    """Servers of all environments, which call a gateway at `gateway_port`."""
    with real_gym(f"http://127.0.0.1:{gateway_port}/v1") as url:
        yield url


@pytest.fixture
def engine(engines: Any, engine_loop: asyncio.Runner) -> Any:
    engine = engines("vllm", "tied")
    published(engine_loop, engine, tiny_model(tied=True), weight_version=WEIGHT_VERSION)
    return engine


@pytest.fixture
def scripted_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model of random weights never writes: a tool call, an action. Its tokens stay what it sampled."""
    turns = itertools.count()

    def calls_now_and_then(text: str) -> tuple[str, tuple[markup.ParsedCall, ...]]:
        if next(turns) % 2:
            return "It is warm.", ()
        return "", (markup.ParsedCall("get_weather", json.dumps({"city": "Here"})),)

    monkeypatch.setitem(markup.CALL_MARKUP, "scripted", markup.CallMarkup(calls_now_and_then))  # type: ignore[arg-type]
    monkeypatch.setitem(markup.REASONING_PARSERS, "scripted", lambda text: (None, "<action>hit</action>"))


def rollouts_of(
    agent: str, runner: asyncio.Runner, engine: Any, head_url: str, port: int, **codec: Any
) -> tuple[Trajectory, ...]:
    async def main() -> tuple[Trajectory, ...]:
        encoder = ChatEncoder(byte_tokenizer("chatml"))
        sampling = SamplingParams(60, temperature=TEMPERATURE, stop_token_ids=STOP_TOKENS)
        rules = CompletionRules("policy", MAX_MODEL_LEN, sampling, 1, max_concurrent_calls=64, timeout_s=DEADLINE_S)
        section = GatewayConfig(port=port, token_env=KEY_VARIABLE)
        manager = await GatewayManager.start(engine, Codec(encoder, **codec), rules, section)
        client = GymClient(NemoGymConfig(head_url=head_url, timeout_s=DEADLINE_S))
        try:
            await client.connect([agent])
            runtime = GymRuntime(client, manager, max_concurrency=1)
            limits = RolloutLimits(max_turns=1, max_total_length=MAX_MODEL_LEN)
            dependencies = RolloutDependencies(engine, {}, encoder, limits, gyms={"gym": runtime})
            sent = {**ROWS[agent], "agent_ref": {"type": "responses_api_agents", "name": agent}}
            prompt = Prompt("p", "gym", (Message("user", "as Gym's"),), {"row": sent}, agent_name=agent)
            jobs = [RolloutJob(prompt, "0:p", index) for index in range(NUM_GENERATIONS)]
            trajectories = await run_nemo_gym_rollouts(jobs, dependencies, RolloutOptions(sampling, seed=3))
            assert manager.num_sessions == (0,)
            assert manager.num_echoed_calls == 0
            return trajectories
        finally:
            await client.close()
            await manager.close()

    return runner.run(asyncio.wait_for(main(), DEADLINE_S))


def check_tokens(trajectories: tuple[Trajectory, ...]) -> None:
    """Every chain's log-probs are those of one exact forward pass over its tokens."""
    model = tiny_model(tied=True)
    for trajectory in trajectories:
        assert trajectory.failure is None
        assert trajectory.weight_versions == (WEIGHT_VERSION, WEIGHT_VERSION)
        for chain in trajectory.chains:
            check_chain(model, chain)


def check_chain(model: Any, chain: MessageLog) -> None:
    tokens = flat_token_ids(chain)
    exact = torch.cat([torch.zeros(1), exact_logprobs(model, tokens[:1], tokens[1:], TEMPERATURE)])
    mask = torch.tensor([message.is_generated for message in chain for _ in message.token_ids])
    assert all(message.is_generated == (message.message.role == "assistant") for message in chain)
    told = torch.tensor([logprob for message in chain for logprob in message.generation_logprobs or ()])
    assert len(told) > 0
    torch.testing.assert_close(told, exact[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize("agent", [REASONING_GYM, MCQA])
def test_single_turns_train_on_what_was_sampled(
    agent: str, engine_loop: asyncio.Runner, engine: Any, head_url: str, gateway_port: int
) -> None:
    trajectories = rollouts_of(agent, engine_loop, engine, head_url, gateway_port)
    check_tokens(trajectories)
    assert [trajectory.num_turns for trajectory in trajectories] == [1] * NUM_GENERATIONS
    assert all(0 <= trajectory.reward <= 1 for trajectory in trajectories)
    assert len({flat_token_ids(trajectory.message_log) for trajectory in trajectories}) == NUM_GENERATIONS
    again = rollouts_of(agent, engine_loop, engine, head_url, gateway_port)
    assert [flat_token_ids(t.message_log) for t in again] == [flat_token_ids(t.message_log) for t in trajectories]


@pytest.mark.usefixtures("scripted_text")
def test_a_tool_call_and_its_answer_are_one_chain(
    engine_loop: asyncio.Runner, engine: Any, head_url: str, gateway_port: int
) -> None:
    trajectories = rollouts_of(TOOL_CALL, engine_loop, engine, head_url, gateway_port, tool_parser_name="scripted")
    check_tokens(trajectories)
    for trajectory in trajectories:
        roles = [message.message.role for message in trajectory.message_log]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        assert "Here" in trajectory.message_log[3].message.content
        assert trajectory.other_chains == ()


@pytest.mark.usefixtures("scripted_text")
def test_a_game_of_several_turns_is_one_chain(
    engine_loop: asyncio.Runner, engine: Any, head_url: str, gateway_port: int
) -> None:
    trajectories = rollouts_of(BLACKJACK, engine_loop, engine, head_url, gateway_port, reasoning_parser_name="scripted")
    check_tokens(trajectories)
    for trajectory in trajectories:  # the hand that gym_servers.py deals: three hits, the third is one too many
        shown = [each.message.content for each in trajectory.message_log if each.message.role == "user"]
        hands = [content.partition("\n")[0] for content in shown]
        assert hands[-2:] == ["Your hand: [7, 4, 2] = 13", "Your hand: [7, 4, 2, 3] = 16"]
        assert (trajectory.num_turns, trajectory.reward, trajectory.other_chains) == (3, -1.0, ())
