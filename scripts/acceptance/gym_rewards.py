"""Do NeMo Gym's servers give the rewards that its example rows store? Through this project's client and gateway.

uv run scripts/acceptance/gym_rewards.py --python GYM/bin/python [SERVER ...] [--at-least 40]

GYM is an environment with nemo-gym 0.7 and the requirements of the servers (`--requirements` prints them). The servers
run as their own classes, ten in one process; the policy says what the stored rollouts hold, call by call, and the
reward must be the stored one. Where it is not, the table has what the server's own verifier says of the stored
response, without this project. Needs no network.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from nemo_rl.distributed.machine import unused_port, unused_ports  # noqa: E402
from nemo_rl.environments.nemo_gym.interpreter import GymPython, resolve_gym_python  # noqa: E402
from nemo_rl.environments.nemo_gym.servers import discover, open_connections  # noqa: E402
from nemo_rl.errors import NemoRLError  # noqa: E402
from nemo_rl.types import GenerationRequest, Trajectory  # noqa: E402
from tests.contracts.gym_rollouts import KEY_VARIABLE, TEMPLATE, run_rows  # noqa: E402
from tests.contracts.real_gym import POLICY_API_KEY, real_gym  # noqa: E402
from tests.unit.gateway.engines import SpeakingGeneration  # noqa: E402

# Servers without sandbox, browser and downloads; rollouts of those with a judge store what it said.
SERVERS = """
aalcr abstention arc_agi asr_with_pc assaybench blackjack bunsenbench_chemistry_mcq calendar circle_click
citation_if code_gen equivalence_llm_judge equivalence_rule evalplus example_multi_step example_multi_turn_gymnasium
example_session_state_mgmt example_single_tool_call example_tool_call_multireward false_statement_judge
format_verification fukuyamabench generative_reward_model gpqa_diamond graphwalks grl_sokoban grl_tetris
gui_coordinate hotpotqa_qa ifbench iheval imo_gradingbench indirect_prompt_injection lc_niah litmus_agent
math_proof_judgement math_with_autograder math_with_code math_with_judge mcqa moldetox mrcr newton_bench nvarc
omniscience openair_congestion polymath proof_genselect ragtruth reasoning_gym ruler ruler2 simpleqa
single_step_tool_use_with_argument_comparison spartqa string_match structeval swe_pivot swerl_gen
terminal_multi_harness text_to_sql wordle xlam_fc
"""
MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
MODEL = {  # of a judge: the gateway, too
    "responses_api_models": {
        "vllm_model": {
            "entrypoint": "app.py",
            "base_url": "${policy_base_url}",
            "api_key": "${policy_api_key}",
            "model": "${policy_model_name}",
            "return_token_id_information": True,
            "uses_reasoning_parser": True,
        }
    }
}
SAID = frozenset({"reasoning", "message", "function_call"})  # items that a model's call returns
COMMON = frozenset({"responses_create_params", "agent_ref", "verifier_type", "license", "dataset"})  # equal in all rows
ROLLOUT_TIMEOUT_S = 120.0
START_TIMEOUT_S = 10.0  # of a server beside others that run
GROUP_START_TIMEOUT_S = 300.0
GROUP = 10  # servers in one process
MAX_SERVERS = 8  # of one configuration
TOLERANCE = 1e-6
MIN_SHARE = 0.9  # of the words of an input, for a row to be taken as the same task


Pair: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # a row and its stored rollout


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a server's rows."""

    num_equal: int = 0
    num_rows: int = 0
    problem: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", default=SERVERS.split())
    parser.add_argument("--python", required=True)
    parser.add_argument("--requirements", action="store_true")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="servers whose rewards must all be equal")
    parsed = parser.parse_args()
    gym = resolve_gym_python(parsed.python, key="--python")
    if parsed.requirements:
        print("\n".join(sorted({line for name in parsed.servers for line in requirements_of(gym, name)})))
        return 0
    os.environ[KEY_VARIABLE] = POLICY_API_KEY
    logging.getLogger("nemo_rl").setLevel(logging.CRITICAL)  # the table has the causes
    print("| server | equal rewards | otherwise |\n|---|---|---|")
    outcomes = [outcome for names in groups(parsed.servers) for outcome in replay(gym, names)]
    num_whole = sum(0 < outcome.num_rows == outcome.num_equal for outcome in outcomes)
    print(f"\n{num_whole} of {len(outcomes)} servers gave all stored rewards")
    return num_whole < parsed.at_least


def groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), GROUP):
        yield names[start : start + GROUP]


def replay(gym: GymPython, names: Sequence[str]) -> Iterator[Outcome]:
    """Run the stored rollouts of some servers, which share a process."""
    configs = {name: find_config(gym.site_packages / "resources_servers" / name, name) for name in names}
    port = unused_port()
    paths = [*(path for path, _ in configs.values()), MODEL_CONFIG]
    ports = unused_ports(len(names) * MAX_SERVERS)
    address = f"http://127.0.0.1:{port}/v1"
    judges = {name: MODEL for path, _ in configs.values() for name in find_judges(gym.site_packages / path)}
    with real_gym(address, environment=gym, config_paths=paths, ports=ports, skip_broken=True, **judges) as head_url:
        asyncio.run(wait_for_head(head_url))
        for name, (_, agent) in configs.items():
            stored = list(read_rollouts(gym.site_packages / "resources_servers" / name))
            outcome = replay_server(agent, stored, head_url, port)
            print(f"| {name} | {outcome.num_equal} of {outcome.num_rows} | {outcome.problem} |", flush=True)
            yield outcome


def replay_server(agent: str, stored: Sequence[Pair], head_url: str, port: int) -> Outcome:
    """Run the stored rollouts of one server."""
    if not stored:
        return Outcome(problem="no stored rollout of its example rows has a reward and a response")
    try:
        results = [replay_row(agent, *pair, head_url, port) for pair in stored]
        controls = [verify(head_url, agent, *pair) for pair, problem in zip(stored, results, strict=True) if problem]
    except (NemoRLError, OSError, LookupError, AssertionError) as error:
        return Outcome(0, len(stored), shorten(str(error)))
    problems = [problem for problem in results if problem]
    text = f"{problems[0]}; its verifier itself: {', '.join(controls)}" if problems else ""
    return Outcome(len(results) - len(problems), len(results), shorten(text))


async def wait_for_head(head_url: str) -> None:
    """Wait until the servers of a group are imported."""
    async with asyncio.timeout(GROUP_START_TIMEOUT_S), open_connections() as http:
        while True:
            with contextlib.suppress(NemoRLError):
                await discover(http, head_url)
                return
            await asyncio.sleep(0.5)


def verify(head_url: str, agent: str, row: dict[str, Any], rollout: dict[str, Any]) -> str:
    """Return the reward that the server itself gives the stored response, without this project."""

    async def main() -> Any:
        async with open_connections() as http:
            servers = (await discover(http, head_url)).by_name
            needs = [servers[each] for each in servers[agent].needs if each in servers]
            url = next(server.url for server in needs if server.kind == "resources_servers")
            async with http.post(f"{url}/verify", json={**row, "response": rollout["response"]}) as response:
                body = await response.json() if response.status == 200 else {}
                return body.get("reward", f"HTTP {response.status}")

    try:
        return str(asyncio.run(asyncio.wait_for(main(), ROLLOUT_TIMEOUT_S)))
    except (OSError, aiohttp.ClientError) as error:
        return type(error).__name__


def replay_row(agent: str, row: dict[str, Any], rollout: dict[str, Any], head_url: str, port: int) -> str:
    """Return how the reward differs from the stored one; empty if it does not."""
    answers = [*answers_of(rollout["response"]["output"]), *judgements_of(rollout)]
    missing: list[int] = []

    def say(request: GenerationRequest, text: str) -> str:
        if not answers:
            missing.append(1)
            return "nothing more is stored"
        return answers.pop(0)

    engine = SpeakingGeneration(TEMPLATE, say)
    (trajectory,) = run_rows(
        [(agent, row)],
        engine=engine,
        head_url=head_url,
        port=port,
        leaves_calls=True,  # those of a judge
        timeout_s=ROLLOUT_TIMEOUT_S,
        start_timeout_s=START_TIMEOUT_S,
    )
    return describe(trajectory, rollout["reward"], len(missing), len(answers))


def describe(trajectory: Trajectory, reward: float, num_missing: int, num_left: int) -> str:
    if trajectory.failure is not None:
        return f"{trajectory.failure.failure_class}: {trajectory.failure.cause}"
    if abs(trajectory.reward - reward) <= TOLERANCE:
        return ""
    calls = (
        f"; {num_missing} calls more than stored" if num_missing else f"; {num_left} calls fewer" if num_left else ""
    )
    return f"reward {trajectory.reward:g}, stored {reward:g}{calls}"


def judgements_of(rollout: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a judge that a rollout stores, in order."""
    if isinstance(text := rollout.get("judge_output"), str):
        yield text
    evaluations = rollout.get("judge_evaluations") or ()
    for response in (rollout.get("judge_response"), *(each.get("response") for each in evaluations)):
        yield from answers_of((response or {}).get("output") or ())


def find_judges(config: Path) -> set[str]:
    """Return the model servers that a configuration names and leaves to others, besides the policy's."""
    parsed = yaml.safe_load(config.read_text())
    found, pending = set(), [parsed]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
            if value.get("type") == "responses_api_models":
                found.add(value["name"])
        elif isinstance(value, list):
            pending += value
    return found - parsed.keys() - {"policy_model"}


def answers_of(output: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of each call of the model; items of others divide calls."""
    said: list[dict[str, Any]] = []
    for item in output:
        kind = item.get("type") or "message"
        if kind in SAID and item.get("role", "assistant") == "assistant":
            if said and kind != "function_call" and said[-1].get("type") in ("message", None):
                yield to_text(said)  # a message ends its call unless calls of tools follow
                said = []
            said.append(item)
        elif said:
            yield to_text(said)
            said = []
    if said:
        yield to_text(said)


def to_text(items: Sequence[dict[str, Any]]) -> str:
    """Return items as a policy with the markup of Qwen 3 writes them."""
    parts = []
    for item in items:
        if item.get("type") == "reasoning":
            text = "\n".join(part["text"] for part in item.get("summary") or item.get("content") or ())
            parts.append(f"<think>\n{text}\n</think>\n\n")
        elif item.get("type") == "function_call":
            call = f'{{"name": {json.dumps(item["name"])}, "arguments": {item["arguments"]}}}'
            parts.append(f"\n<tool_call>\n{call}\n</tool_call>")
        else:
            content = item["content"]
            parts.append(content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
    return "".join(parts)


def read_rollouts(directory: Path) -> Iterator[Pair]:
    """Yield stored rollouts with the example row that is most alike, else that of their index.

    Those of other tasks than the example rows are left out.
    """
    rows = read_lines(directory / "data/example.jsonl")
    for place, rollout in enumerate(read_lines(directory / "data/example_rollouts.jsonl")):
        if rollout.get("reward") is None or not (rollout.get("response") or {}).get("output"):
            continue
        index = min(rollout.get("_ng_task_index", place), len(rows) - 1)
        row = max(rows, key=lambda row: (likeness(row, rollout), row is rows[index]))
        is_same, num_equal, share = likeness(row, rollout)
        if is_same or num_equal or share > MIN_SHARE:
            yield row, rollout
        elif "_ng_task_index" in rollout:
            yield rows[index], rollout


def likeness(row: dict[str, Any], rollout: dict[str, Any]) -> tuple[bool, int, float]:
    """Return whether the texts of the input are equal, the number of equal fields, and the share of equal words."""
    num_equal = sum(name in rollout and rollout[name] == value for name, value in row.items() if name not in COMMON)
    texts = texts_of(row), texts_of(rollout)
    words, others = (set(text.split()) for text in texts)
    return texts[0] == texts[1], num_equal, len(words & others) / max(len(words | others), 1)


def texts_of(row: dict[str, Any]) -> str:
    """Return the texts of a row's input; servers fill in defaults of its other fields."""
    given = (row.get("responses_create_params") or {}).get("input")
    if isinstance(given, str):
        return given
    contents = [item.get("content") for item in given or () if isinstance(item, dict)]
    parts = [[content] if isinstance(content, str) else content or () for content in contents]
    return "\n".join(part if isinstance(part, str) else str(part.get("text")) for each in parts for part in each)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def find_config(directory: Path, name: str) -> tuple[str, str]:
    """Return the configuration of a server and its agent: the file of its name, else the first with one agent."""
    files = sorted((directory / "configs").glob("*.yaml"), key=lambda file: (file.stem != name, file.name))
    for file in files:
        config = yaml.safe_load(file.read_text())
        agents = [key for key, entry in config.items() if isinstance(entry, dict) and "responses_api_agents" in entry]
        simple = [agent for agent in agents if "simple_agent" in config[agent]["responses_api_agents"]]
        if agents:
            return f"resources_servers/{name}/configs/{file.name}", (simple or agents)[0]
    raise LookupError("no configuration with an agent")


def requirements_of(gym: GymPython, name: str) -> list[str]:
    file = gym.site_packages / "resources_servers" / name / "requirements.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        line for line in lines if line.strip() and not line.startswith("#") and "nemo" not in line and "../" not in line
    ]


def shorten(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:240]


if __name__ == "__main__":
    sys.exit(main())
