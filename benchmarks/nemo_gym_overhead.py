"""Cost of a model call of NeMo Gym on this side: client, gateway, assembly. 256 rollouts at once.

uv run benchmarks/nemo_gym_overhead.py [--profile]

The stack is a script in a process of its own: an agent that calls the policy, sends back the tokens of its calls as Gym
does, and gives a reward. The engine answers at once, so what this process uses is ours.
"""

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp import web

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.launch.model_files import QUICKSTART_MODEL
from nemo_rl.launch.models import resolve_model
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Message, Prompt, SamplingParams, TrajectoryGroup

NUM_ROLLOUTS, GROUP_SIZE = 256, 8
WARM_UP_ROUNDS, ROUNDS = 1, 5
MAX_MODEL_LEN = 4096
BAR_MS = 3.0
QUESTION = "Spell this word backward (example: sun -> nus): cat"
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class AnswersAtOnce:
    """No engine at all."""

    is_async = True

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            count = request.sampling.max_new_tokens
            logprobs = tuple(-1.0 / (i + 3) for i in range(count))  # as long when written as real ones
            yield Completion(request.request_id, (40,) * count, logprobs, "stop")


async def serve(policy_url: str) -> None:
    """Run the stack process, a head and one agent: print the head's port and serve until terminated."""
    ports = {}
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def config(request: web.Request) -> web.Response:
        agent = f"agent: {{responses_api_agents: {{simple_agent: {{host: 127.0.0.1, port: {ports['agent']}}}}}}}"
        return web.json_response(agent)

    async def alive(request: web.Request) -> web.Response:
        return web.json_response({})

    async def run(request: web.Request) -> web.Response:
        row = await request.json()
        parameters = row["responses_create_params"]
        messages, output = list(parameters["input"]), []
        for turn in range(row["turns"]):
            if turn:
                messages.append({"role": "user", "content": "again"})
            body = {"messages": messages, "model": "policy", "metadata": parameters["metadata"], "logprobs": True}
            body |= {"top_logprobs": 0, "return_tokens_as_token_ids": True}
            async with http.post(f"{policy_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            tokens = {name: message[name] for name in TOKEN_FIELDS}
            output.append({"type": "message", "role": "assistant", "content": message["content"], **tokens})
        return web.json_response({**row, "response": {"output": output}, "reward": 1.0})

    for name, routes in (
        ("agent", [web.get("/", alive), web.post("/run", run)]),
        ("head", [web.get("/", alive), web.get("/global_config_dict_yaml", config)]),
    ):
        app = web.Application(client_max_size=2**28)
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        ports[name] = runner.addresses[0][1]
    print(ports["head"], flush=True)
    await asyncio.Event().wait()


async def measure(codec: Codec, turns: int, num_tokens: int, profile: cProfile.Profile | None) -> str:
    """One line of the table."""
    engine = AnswersAtOnce()
    sampling = SamplingParams(num_tokens)
    rules = CompletionRules("policy", MAX_MODEL_LEN, sampling, seed=1, max_concurrent_calls=4096, timeout_s=600)
    manager = await GatewayManager.start(engine, codec, rules, GatewayConfig())  # type: ignore[arg-type]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", manager.default_base_url, stdout=pipe
    )
    assert process.stdout is not None
    head_url = f"http://127.0.0.1:{int(await process.stdout.readline())}"
    client = GymClient(NemoGymConfig(head_url=head_url, max_concurrency=NUM_ROLLOUTS))
    await client.connect(["agent"])
    runtime = GymRuntime(client, manager, max_concurrency=NUM_ROLLOUTS)
    limits = RolloutLimits(max_turns=turns, max_total_length=MAX_MODEL_LEN)
    dependencies = RolloutDependencies(engine, {}, codec.encoder, limits, gyms={"gym": runtime})  # type: ignore[arg-type]
    options = RolloutOptions(sampling, seed=1)
    figures = []
    for index in range(WARM_UP_ROUNDS + ROUNDS):
        if profile is not None and index == WARM_UP_ROUNDS:
            profile.enable()
        figures.append(await one_round(dependencies, options, turns))
    if profile is not None:
        profile.disable()
    await client.close()
    process.terminate()
    await process.wait()
    await manager.close()
    ms, rate = (statistics.median(each) for each in zip(*figures[WARM_UP_ROUNDS:], strict=True))
    return f"| {turns} | {num_tokens} | {ms:.2f} | {rate:,.0f} |"


async def one_round(dependencies: RolloutDependencies, options: RolloutOptions, turns: int) -> tuple[float, float]:
    """CPU milliseconds of this process and calls a second."""
    groups = NUM_ROLLOUTS // GROUP_SIZE
    parameters = {"input": [{"role": "user", "content": QUESTION}]}
    row = {"responses_create_params": parameters, "agent_ref": {"name": "agent"}, "turns": turns}
    prompts = [
        Prompt(f"p{i}", "gym", (Message("user", QUESTION),), {"row": row}, agent_name="agent") for i in range(groups)
    ]
    jobs = [RolloutJob(prompt, prompt.prompt_id, index) for prompt in prompts for index in range(GROUP_SIZE)]
    cpu, started = time.process_time(), time.perf_counter()
    done = await run_nemo_gym_rollouts(jobs, dependencies, options)
    assert all(trajectory.failure is None for trajectory in done), done[0].failure
    members = [done[i * GROUP_SIZE : (i + 1) * GROUP_SIZE] for i in range(groups)]
    assemble_batch([TrajectoryGroup(m[0].group_id, m[0].prompt, m) for m in members], min_group_size=1)
    calls = NUM_ROLLOUTS * turns
    return 1000 * (time.process_time() - cpu) / calls, calls / (time.perf_counter() - started)


async def main(*, is_profiled: bool) -> None:
    codec = Codec(ChatEncoder(load_tokenizer(TokenizerConfig(), await resolve_model(QUICKSTART_MODEL))))
    print(f"{NUM_ROLLOUTS} rollouts at once, medians of {ROUNDS} rounds")
    print(f"| calls a rollout | tokens a call | CPU ms a call [{BAR_MS}] | calls/s |\n|---|---|---|---|", flush=True)
    for turns, num_tokens in ((1, 64), (1, 256), (3, 64), (3, 256)):
        profile = cProfile.Profile() if is_profiled else None
        print(await measure(codec, turns, num_tokens, profile), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", metavar="POLICY_URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.serve) if arguments.serve else main(is_profiled=arguments.profile))
