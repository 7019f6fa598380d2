"""A started stack of NeMo Gym's own processes: from files as others write them, until a server dies, and again."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from nemo_rl.environments.nemo_gym.client import open_gym_client
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig, ServedPolicy
from nemo_rl.environments.nemo_gym.interpreter import GymPython
from nemo_rl.environments.nemo_gym.reply import GymStackEnded
from nemo_rl.environments.nemo_gym.servers import discover, open_connections
from tests.contracts.real_gym import (
    MCQA,
    POLICY_API_KEY,
    TOOL_CALL,
    VERSIONS,
    example_rows,
    gym_environment,
    stack_processes,
)
from tests.contracts.scripted_policy import ScriptedPolicy, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two starts of seven processes and more

CONFIG_PATHS = [
    "responses_api_models/vllm_model/configs/vllm_model.yaml",  # says that it returns no tokens
    "resources_servers/mcqa/configs/mcqa.yaml",
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml",
]
ENV_FILE = Path("run/nemo_gym/env.yaml")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stack_that_lost_a_server_ends_and_starts_again(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gym = gym_environment(version)
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        policy = ScriptedPolicy({"content": "Answer: \\boxed{A}"})
        async with serving(policy) as base_url:
            for _ in range(2):
                await run_until_a_server_dies(gym, base_url)

    asyncio.run(run())


async def run_until_a_server_dies(gym: GymPython, base_url: str) -> None:
    section = NemoGymConfig(config_paths=CONFIG_PATHS, python=str(gym.python))
    policy, agents = ServedPolicy(base_url, POLICY_API_KEY, "policy"), (MCQA, TOOL_CALL)
    async with AsyncExitStack() as stack:
        client = await open_gym_client(
            "nemo_gym", section, agents=agents, policy=policy, run_dir=Path("run"), stack=stack
        )
        for agent, environment in zip(agents, ("mcqa", "example_single_tool_call"), strict=True):
            reply = await client.run(agent, example_rows(environment, gym)[0])
            tokens = [
                (call.prompt_token_ids, call.generation_token_ids, call.generation_log_probs) for call in reply.calls
            ]
            assert tokens == [((1, 2), (3, 4), (-0.5, -0.25))]
        processes = stack_processes(ENV_FILE)
        async with open_connections() as http:
            servers = await discover(http, client._head_url)
        port = int(servers.by_name["mcqa"].url.rpartition(":")[2])
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        (listener,) = {connection.pid for connection in listening if tuple(connection.laddr)[1] == port}
        assert listener is not None
        assert listener in processes
        os.kill(listener, signal.SIGKILL)
        with pytest.raises(GymStackEnded, match="has ended"):
            await client.run(MCQA, example_rows("mcqa", gym)[0])
    assert processes
    assert not stack_processes(ENV_FILE)
