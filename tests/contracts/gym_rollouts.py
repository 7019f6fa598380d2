"""Rollouts of rows by a real stack of NeMo Gym against a real gateway, whose engine says what a test scripts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.types import Message, Prompt, Trajectory
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.engines import codec_of, rules

TEMPLATE = "qwen3"  # renders tools
KEY_VARIABLE = "KEY_OF_THE_RUN"  # environment variable that a test sets to real_gym.POLICY_API_KEY
DEADLINE_S = 300.0
MAX_MODEL_LEN = 4_000_000  # tokens are bytes


def run_rows(
    rows: Sequence[tuple[str, dict[str, Any]]],
    *,
    engine: FakeGeneration,
    codec: Codec | None = None,
    head_url: str,
    port: int,
    leaves_calls: bool = False,
    progress: Callable[[Trajectory], None] | None = None,
    **section: Any,
) -> tuple[Trajectory, ...]:
    """Return one rollout per (agent, row), in order; no session may be left in the gateway.

    `codec` is that of TEMPLATE by default.

    Nor may a call without a session, unless `leaves_calls`: judges make some that no reply names.
    """

    async def main() -> tuple[Trajectory, ...]:
        spoken = codec or codec_of(TEMPLATE)
        the_rules = rules(TEMPLATE, max_model_len=MAX_MODEL_LEN, max_new_tokens=65_536)
        sampling = replace(the_rules.sampling, stop_token_ids=spoken.encoder.stop_token_ids)
        the_rules = replace(the_rules, sampling=sampling)
        manager = await GatewayManager.start(
            engine, spoken, the_rules, GatewayConfig(port=port, token_env=KEY_VARIABLE)
        )
        settings: dict[str, Any] = {
            "timeout_s": 60.0,
            "start_timeout_s": 90.0,
            "retry_backoff_s": 0.01,
            "max_retries": 2,
        }
        settings |= section
        client = GymClient(NemoGymConfig(head_url=head_url, **settings))
        try:
            await client.connect({agent for agent, _ in rows})
            limits = RolloutLimits(max_turns=1, max_total_length=MAX_MODEL_LEN)
            runtime = GymRuntime(client, manager, max_concurrency=16)
            dependencies = RolloutDependencies(engine, {}, spoken.encoder, limits, gyms={"gym": runtime})
            jobs = []
            for index, (agent, row) in enumerate(rows):
                sent = {**row, "agent_ref": {"type": "responses_api_agents", "name": agent}}
                prompt = Prompt(f"p{index}", "gym", (Message("user", "as Gym's"),), {"row": sent}, agent_name=agent)
                jobs.append(RolloutJob(prompt, f"0:{index}", 0))
            options = RolloutOptions(the_rules.sampling, seed=3, progress=progress)
            trajectories = await run_nemo_gym_rollouts(jobs, dependencies, options)
            assert sum(manager.num_sessions) == 0
            assert leaves_calls or manager.num_echoed_calls == 0
            return trajectories
        finally:
            await client.close()
            await manager.close()

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
