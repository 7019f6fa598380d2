"""Real servers of nemo-gym 0.7 through a real gateway: typed episodes, each failure that they report, token capture."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.nemo_gym_dataset import open_task
from nemo_rl.distributed.machine import unused_port
from nemo_rl.environments.nemo_gym.failures import CLASS_OF_KIND, CLASS_OF_STAGE
from nemo_rl.gateway.server import ServerSettings
from nemo_rl.types import FailureClass, GenerationRequest, StopReason, Trajectory
from tests.contracts.gym_rollouts import KEY_VARIABLE, TEMPLATE, run_rows
from tests.contracts.real_gym import POLICY_API_KEY, example_rows, gym_environment, real_gym
from tests.fakes.gym_vocabulary import KINDS, STAGES
from tests.unit.gateway.engines import SpeakingGeneration, started, tokens_of

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

VERSION = "0.7.0"
HERE = Path(__file__).parent
IN_GYM = HERE.parents[1] / "nemo_rl/environments/nemo_gym/in_gym"
SCRIPT_TIMEOUT_S = 120.0
EPISODE_TIMEOUT_S = 3.0
QUEUE_TIMEOUT_S = 0.2
MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
TOOL_CONFIG = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def ref(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "name": name}


def failing(kind: str, file: str, **settings: Any) -> dict[str, Any]:
    return {kind: {"failing": {**settings, "entrypoint": str(HERE / "gym_failing" / file)}}}


def agent(resources: str) -> dict[str, Any]:
    servers = {
        "resources_server": ref("resources_servers", resources),
        "model_server": ref("responses_api_models", "policy_model"),
    }
    return {"entrypoint": "app.py", **servers}


def turn(resources: str, agent: str, **settings: Any) -> dict[str, Any]:
    servers = {
        "resources_server": ref("resources_servers", resources),
        "agent_server": ref("responses_api_agents", agent),
    }
    return {"entrypoint": "app.py", "cleanup_timeout_seconds": 10, **servers, **settings}


def relay(agent: str) -> dict[str, Any]:
    server = {"entrypoint": "app.py", "agent_server": ref("responses_api_agents", agent)}
    return {"environment_servers": {"legacy_agent": server}}


TOOL = "example_single_tool_call"
SERVERS: dict[str, Any] = {
    "failing": failing("resources_servers", "resources.py", domain="other"),
    "relayed": {"responses_api_agents": {"simple_agent": agent("failing")}},
    "relay": relay("relayed"),
    "verified": {"responses_api_agents": {"simple_agent": agent("failing")}},
    "verification": {"environment_servers": {"single_agent_turn": turn("failing", "verified")}},
    "reporting": failing(
        "environment_servers",
        "environment.py",
        cleanup_timeout_seconds=1,
        default_episode_timeout_seconds=EPISODE_TIMEOUT_S,
    ),
    "limited": failing(
        "environment_servers",
        "environment.py",
        cleanup_timeout_seconds=1,
        max_concurrent_episodes=1,
        queue_timeout_seconds=QUEUE_TIMEOUT_S,
    ),
    "opaque": failing("responses_api_agents", "opaque_agent.py", token_id_capture=True, **agent(TOOL)),
    "opaque_relay": relay("opaque"),
    "session_agent": {"responses_api_agents": {"simple_agent": agent(TOOL)}},
    "session_turn": {
        "environment_servers": {
            "single_agent_turn": turn(TOOL, "session_agent", resources_tool_transports=["direct_http"])
        }
    },
    "flat_agent": {"responses_api_agents": {"simple_agent": agent(TOOL)}},
    "flat_turn": {
        "environment_servers": {
            "single_agent_turn_legacy": turn(TOOL, "flat_agent", resources_tool_transports=["direct_http"])
        }
    },
}


@pytest.fixture(autouse=True)
def key_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, POLICY_API_KEY)


@pytest.fixture(scope="module")
def port() -> int:
    return unused_port()


@pytest.fixture(scope="module")
def head_url(port: int) -> Iterator[str]:
    gateway = {"url": f"http://127.0.0.1:{port}/v1", "api_key": POLICY_API_KEY}
    capture = {
        "enabled": True,
        "sink": "gateway_capture:GatewaySink",
        "sink_kwargs": gateway,
        "lineage_store": "gateway_capture:GatewayLineage",
        "lineage_store_kwargs": gateway,
        "rebuild_response": False,
    }
    with real_gym(
        gateway["url"],
        environment=gym_environment(VERSION),
        config_paths=(TOOL_CONFIG, MODEL_CONFIG),
        python_path=[str(IN_GYM)],
        token_id_capture=capture,
        **SERVERS,
    ) as url:
        yield url


def hello(request: GenerationRequest, text: str) -> str:
    return "hello"


def ask(**fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": "?"}]}, **fields}


def failures_of(rows: list[tuple[str, dict[str, Any]]], head_url: str, port: int, **how: Any) -> list[tuple[str, str]]:
    """The class and cause of each row's failure: none has a reward."""
    trajectories = run_rows(rows, engine=SpeakingGeneration(TEMPLATE, hello), head_url=head_url, port=port, **how)
    assert all(t.stop_reason is StopReason.FAILED and not t.rewards for t in trajectories)
    return [(t.failure.failure_class, t.failure.cause) for t in trajectories if t.failure is not None]


def test_the_vocabulary_is_that_of_the_installed_release() -> None:
    code = (
        "import json, typing; from nemo_gym.failure_kinds import FAILURE_KINDS, FailureStage;"
        "print(json.dumps([sorted(FAILURE_KINDS), sorted(typing.get_args(FailureStage))]))"
    )
    done = subprocess.run(
        [str(gym_environment(VERSION).python), "-c", code], capture_output=True, check=True, timeout=SCRIPT_TIMEOUT_S
    )
    assert json.loads(done.stdout) == [sorted(KINDS), sorted(STAGES)]


def test_each_kind_and_stage_that_an_environment_server_reports_has_its_class(head_url: str, port: int) -> None:
    reports: list[dict[str, Any]] = [{"failure_kind": kind} for kind in sorted(KINDS)]
    reports += [{"stage": stage} for stage in sorted(STAGES)]
    expected = [CLASS_OF_KIND[kind] for kind in sorted(KINDS)] + [CLASS_OF_STAGE[stage] for stage in sorted(STAGES)]
    rows = [("reporting", ask(fail={"failure_reason": "broke", "terminal": True, **report})) for report in reports]
    found = failures_of(rows, head_url, port)
    assert [failure_class for failure_class, _ in found] == expected
    assert all(cause.endswith(": broke") for _, cause in found)


def test_each_kind_that_a_verifier_masks_its_reward_with_has_its_class(head_url: str, port: int) -> None:
    kinds = sorted(KINDS)
    rows = [("relayed", ask(fail={"mask_sample": True, "failure_kind": kind})) for kind in kinds]
    rows += [("verified", row) for _, row in rows]
    assert [failure_class for failure_class, _ in failures_of(rows, head_url, port)] == [
        CLASS_OF_KIND[kind] for kind in kinds
    ] * 2


def test_what_breaks_in_gyms_own_servers_is_a_failure_of_its_place(head_url: str, port: int) -> None:
    rows = [
        ("reporting", ask(fail="raise")),
        ("relayed", ask(fail="judge")),
        ("relayed", ask(fail="raise")),
        ("verified", ask(fail="judge")),
        ("verified", ask(fail="raise")),
        ("relayed", {"responses_create_params": {"input": 3}}),
        ("verified", {"responses_create_params": {"input": 3}}),
        ("reporting", ask(fail="hang")),
    ]
    expected = [
        (FailureClass.ENVIRONMENT, "RuntimeError: not handled"),
        (FailureClass.REWARD, "judge_failed: the judge is away"),
        (FailureClass.ENVIRONMENT, "the verifier broke"),  # a relay passes the agent's HTTP 500 on
        (FailureClass.REWARD, "judge_failed: the judge is away"),
        (FailureClass.REWARD, "failed at stage verification"),
        (FailureClass.ENVIRONMENT, "HTTP 422"),
        (FailureClass.ENVIRONMENT, "HTTP 422"),
        (FailureClass.ENVIRONMENT, "Episode timed out"),
    ]
    found = failures_of(rows, head_url, port)
    assert [failure_class for failure_class, _ in found] == [failure_class for failure_class, _ in expected]
    assert [part in cause for (_, cause), (_, part) in zip(found, expected, strict=True)] == [True] * len(rows)


def test_episodes_turned_away_at_admission_are_attempted_again(head_url: str, port: int, tmp_path: Path) -> None:
    """One runs until the other, which it keeps out, has been turned away for the last time."""
    end = tmp_path / "end"
    rows = [("limited", ask(fail={"wait_for": str(end)}))] * 2
    how: dict[str, Any] = {"max_retries": 3, "retry_backoff_s": 0.1, "progress": lambda trajectory: end.touch()}
    first, second = sorted((cause for _, cause in failures_of(rows, head_url, port, **how)), key=len)
    assert "not handled" in first
    assert "not accepted in 4 attempts (failed at stage admission: Episode admission timed out)" in second


def speaks_of_weather(request: GenerationRequest, text: str) -> str:
    return "It is cold." if "<tool_response>" in text else WEATHER_CALL


def check_weather(trajectory: Trajectory) -> None:
    assert trajectory.failure is None
    assert trajectory.other_chains == ()
    sampled = [message.token_ids for message in trajectory.message_log if message.is_generated]
    assert sampled == [tokens_of(TEMPLATE, WEATHER_CALL), tokens_of(TEMPLATE, "It is cold.")]
    assert "Ulm" in trajectory.message_log[-2].message.content


@pytest.mark.parametrize("agent", ["session_agent", "flat_agent", "example_single_tool_call_simple_agent", "opaque"])
def test_a_rollout_with_a_tool_is_one_chain_of_what_was_sampled(agent: str, head_url: str, port: int) -> None:
    """By a typed episode, one with a flat reply, a relay, and an agent whose calls only the capture shows."""
    row = example_rows("example_single_tool_call", gym_environment(VERSION))[0]
    engine = SpeakingGeneration(TEMPLATE, speaks_of_weather)
    for trajectory in run_rows([(agent, row)] * 3, engine=engine, head_url=head_url, port=port):
        check_weather(trajectory)
        assert trajectory.reward == 1.0


@pytest.mark.parametrize("agent", ["session_agent", "flat_agent", "opaque"])
def test_a_materialized_task_is_run_as_the_row_that_it_was(agent: str, head_url: str, port: int) -> None:
    row = example_rows(TOOL, gym_environment(VERSION))[0]
    asked, data = {"responses_create_params": row.pop("responses_create_params")}, {"task_data": row}
    for task_input in ({**asked, **row}, {**asked, **data}):
        opened = open_task({"task_id": {"taskset": "weather", "task_id": "7"}, "task_input": task_input})
        engine = SpeakingGeneration(TEMPLATE, speaks_of_weather)
        (trajectory,) = run_rows([(agent, dict(opened))], engine=engine, head_url=head_url, port=port)
        check_weather(trajectory)


CONFORMANCE = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from gateway_capture import GatewayLineage, GatewaySink, GatewaySource
from nemo_gym.token_id_capture.conformance import run_conformance
gateway = sys.argv[2:]
checks = (lambda: GatewaySink(*gateway)), (lambda: GatewaySource(*gateway)), (lambda: GatewayLineage(*gateway))
print(*asyncio.run(run_conformance(*checks)))
"""
READS = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from gateway_capture import GatewayLineage, GatewaySink
from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.records import TokenEntry, stamp_lineage

class Counting(GatewayLineage):
    num_records = 0
    def _get(self, *path, **query):
        answer = super()._get(*path, **query)
        self.num_records += len(answer.get("records", [None]))
        return answer

async def main():
    sink, lineage, items, tokens = GatewaySink(*sys.argv[2:]), Counting(*sys.argv[2:]), [], []
    for turn in range(6):
        items = [*items, {"type": "message", "role": "user", "content": f"question {turn}"}]
        lineage.num_records = 0
        found = await lineage.resolve("r", items)
        assert found.match is None if turn == 0 else found.match.cumulative_token_ids == tuple(tokens), found
        print(lineage.num_records)
        said = {"type": "message", "role": "assistant", "content": f"answer {turn}"}
        entry = TokenEntry(rollout_id="r", model_call_id=f"c{turn}", prompt_token_ids=[*tokens, 1],
            generation_token_ids=[2 + turn], generation_log_probs=[-0.5], output_items=[said])
        await sink.put(stamp_continuation(stamp_lineage(entry, found.match and found.match.model_call_id), items))
        items, tokens = [*items, said], [*tokens, 1, 2 + turn]
    await sink.close()

asyncio.run(main())
"""
CHECKS = {
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
    "begin_call_custody",
}


def in_gym(code: str) -> list[str]:
    """Run code in Gym's Python against a gateway; return the words that it printed."""
    python = gym_environment(VERSION).python

    async def check() -> str:
        async with AsyncExitStack() as stack:
            settings = ServerSettings(token=POLICY_API_KEY)
            gateway = await started(SpeakingGeneration("chatml", hello), settings=settings)
            stack.push_async_callback(gateway.close)
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-c", code, str(IN_GYM), f"{gateway.base_url}/v1", POLICY_API_KEY),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await asyncio.wait_for(process.communicate(), SCRIPT_TIMEOUT_S)
            assert process.returncode == 0, errors.decode()[-2000:]
            return output.decode()

    return asyncio.run(check()).split()


def test_gyms_conformance_checks_of_token_capture_pass() -> None:
    assert set(in_gym(CONFORMANCE)) == CHECKS


def test_the_call_that_a_request_continues_is_found_by_reading_two_records() -> None:
    """The newest, and that whose tokens are needed, however long the rollout is."""
    assert in_gym(READS) == ["0", "2", "2", "2", "2", "2"]
