"""The client against NeMo Gym's own servers, with a policy that always says the same."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.environments.nemo_gym.interpreter import GymPython
from nemo_rl.environments.nemo_gym.reply import GymRefused, GymReply
from tests.contracts.real_gym import (
    AGENTS,
    BLACKJACK,
    MCQA,
    REASONING_GYM,
    TOOL_CALL,
    VERSIONS,
    example_rows,
    gym_environment,
    real_gym,
)
from tests.contracts.scripted_policy import ScriptedPolicy, serving

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

WEATHER_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}


class SwitchedPolicy(ScriptedPolicy):
    """One endpoint for all cases, as the servers of a version are started once."""

    def __init__(self, gym: GymPython) -> None:
        super().__init__()
        self.current = ScriptedPolicy()
        self._gym = gym

    def rows(self, environment: str) -> list[dict[str, Any]]:
        return example_rows(environment, self._gym)

    async def chat(self, request: web.Request) -> web.Response:
        return await self.current.chat(request)


@pytest.mark.parametrize("version", VERSIONS)
def test_rollouts_of_real_agents(version: str) -> None:
    """All claims over one start of the servers; each case is a row, a policy and what must come of them."""
    gym = gym_environment(version)

    async def run() -> None:
        policy = SwitchedPolicy(gym)
        async with serving(policy) as policy_base_url:
            with real_gym(policy_base_url, environment=gym) as head_url:
                client = GymClient(NemoGymConfig(head_url=head_url))
                try:
                    await client.connect(AGENTS)
                    for case in CASES:
                        await case(client, policy)
                finally:
                    await client.close()

    asyncio.run(run())


async def rollout(
    client: GymClient, policy: SwitchedPolicy, agent: str, row: Any, *answers: dict[str, Any]
) -> GymReply:
    policy.current = ScriptedPolicy(*answers)
    return await client.run(agent, row)


async def what_is_passed_on(client: GymClient, policy: SwitchedPolicy) -> None:
    row = json.loads(json.dumps(policy.rows("reasoning_gym")[0]))
    row["responses_create_params"] |= {
        "temperature": 0.5,
        "max_output_tokens": 17,
        "user": "rollout 7",
        "metadata": {"session": "s1", "extra_body": '{"seed": 5}'},
    }
    reply = await rollout(client, policy, REASONING_GYM, row, {"content": "nothing"})
    (body,) = policy.current.bodies
    kept = {name: body[name] for name in ("temperature", "max_tokens", "user", "seed", "model")}
    assert kept == {"temperature": 0.5, "max_tokens": 17, "user": "rollout 7", "seed": 5, "model": "policy"}
    assert body["metadata"]["session"] == "s1"
    assert [(call.prompt_token_ids, call.generation_token_ids) for call in reply.calls] == [((1, 2), (3, 4))]
    assert reply.calls[0].generation_log_probs == (-0.5, -0.25)


async def right_and_wrong_answers(client: GymClient, policy: SwitchedPolicy) -> None:
    row = policy.rows("reasoning_gym")[0]
    right = await rollout(client, policy, REASONING_GYM, row, {"content": f"<answer>{row['answer']}</answer>"})
    wrong = await rollout(client, policy, REASONING_GYM, row, {"content": "<answer>no</answer>"})
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    question = policy.rows("mcqa")[0]
    letters = [option for options in question["options"] for option in options]
    rewards = [
        (await rollout(client, policy, MCQA, question, {"content": f"Answer: \\boxed{{{letter}}}"})).reward
        for letter in letters
    ]
    assert sorted(rewards, reverse=True) == [1.0] + [0.0] * (len(letters) - 1)


async def tools(client: GymClient, policy: SwitchedPolicy) -> None:
    row = policy.rows("example_single_tool_call")[0]
    call = {"content": None, "tool_calls": [WEATHER_CALL]}
    reply = await rollout(client, policy, TOOL_CALL, row, call, {"content": "cold"})
    kinds = [item["type"] for item in reply.output]
    assert kinds == ["function_call", "function_call_output", "message"]
    assert [call.prompt_token_ids for call in reply.calls] == [(1, 2), (1, 2, 3, 4, 9)]
    last = policy.current.bodies[-1]["messages"]
    assert [message["role"] for message in last[-2:]] == ["assistant", "tool"]
    assert last[-2]["generation_token_ids"] == [3, 4]
    assert "get_weather" in [tool["function"]["name"] for tool in policy.current.bodies[0]["tools"]]


async def a_game(client: GymClient, policy: SwitchedPolicy) -> None:
    row = policy.rows("blackjack")[0]
    hit, stand = ({"content": f"<action>{action}</action>"} for action in ("hit", "stand"))
    reply = await rollout(client, policy, BLACKJACK, row, hit, hit, stand)
    assert reply.reward in (-1.0, 0.0, 1.0)
    prompts = [(1, 2), (1, 2, 3, 4, 9), (1, 2, 3, 4, 9, 3, 4, 9)]
    assert [(call.prompt_token_ids, call.generation_token_ids) for call in reply.calls] == [
        (prompt, (3, 4)) for prompt in prompts
    ]


async def a_full_context(client: GymClient, policy: SwitchedPolicy) -> None:
    """The words that make Gym end a rollout as truncated, where any other 400 of the policy fails it."""
    row = policy.rows("reasoning_gym")[0]
    full = {"error": {"message": "beyond the context length", "code": 400}}
    reply = await rollout(client, policy, REASONING_GYM, row, full)
    assert (reply.is_incomplete, reply.calls, reply.reward) == (True, (), 0.0)
    with pytest.raises(GymRefused, match=r"HTTP 500: .*inner server.*something else"):
        await rollout(client, policy, REASONING_GYM, row, {"error": {"message": "something else"}})


async def no_such_field(client: GymClient, policy: SwitchedPolicy) -> None:
    row = {"responses_create_params": {"input": "?", "seed": 1}}
    with pytest.raises(GymRefused, match=r"HTTP 422: .*seed"):
        await rollout(client, policy, REASONING_GYM, row, {"content": "?"})


CASES = (what_is_passed_on, right_and_wrong_answers, tools, a_game, a_full_context, no_such_field)
