"""What a policy writes is neither executed nor believed: hostile responses to every environment, scorer and agent.

No response may leave something behind, hold the event loop, earn more than a wrong answer, or count as a failure.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from aiohttp import web
from reasoning_gym.factory import DATASETS

from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.data.reasoning_gym_rows import check_entry
from nemo_rl.data.rows import to_jsonable
from nemo_rl.distributed.cluster import connect
from nemo_rl.environments.math_answers import MathEnvironment, MathEnvironmentConfig
from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironment, ReasoningGymEnvironmentConfig
from nemo_rl.environments.scored_turn import RewardModelEnvironment
from nemo_rl.environments.scorers.classifier import RewardModel, score_padded
from nemo_rl.environments.scorers.classify import ClassifyScorer, ClassifyScorerConfig
from nemo_rl.environments.scorers.function_scorer import FunctionScorerConfig, RuleScorer
from nemo_rl.environments.scorers.judge import JudgeScorer, JudgeScorerConfig
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.environments.scorers.reward_model_replicas import RewardModelScorer
from nemo_rl.environments.sliding_puzzle import (
    SlidingPuzzleEnvironment,
    SlidingPuzzleEnvironmentConfig,
    generate_puzzle,
)
from nemo_rl.environments.tools import ToolsEnvironment, ToolsEnvironmentConfig
from nemo_rl.experience.command_agent import CommandAgent
from nemo_rl.experience.turns import strip_tool_fields
from nemo_rl.interfaces import Environment, Scorer
from nemo_rl.launch.training import tuned_garbage_collection
from nemo_rl.types import EnvStep, Failure, Message, Prompt, ResponseFault, ScoreRequest
from tests.contracts.hostile_responses import BOMBS, hostile_responses
from tests.contracts.test_reward_model import save
from tests.fakes.agent_programs import ASK
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.scoring_server import scoring_server
from tests.unit.environments import custom
from tests.unit.experience import test_agents as agents
from tests.unit.experience.rollout_setup import jobs

TASKS = sorted(set(DATASETS) - {"composite"})
MAX_STALL_S = 0.1  # computing time of the event loop's thread without a pause
# polynomial_multiplication, which parses as they do, gets all bombs
SYMBOLIC_TASKS = {"simple_integration", "intermediate_integration"}
NUM_BOMBS = 3
# Up to a minute each; symbolic expressions are those of test_mathematics, too.
PARTS = [pytest.param(TASKS[i::12], id=f"{i + 1} of 12", marks=() if i == 11 else pytest.mark.slow) for i in range(12)]
CONTEXT_LENGTH = 128  # of the reward model


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    for directory in (tmp_path, *tmp_path.parents[:3]):
        directory.chmod(0o777)
    return tmp_path


async def longest_stall(done: asyncio.Event) -> float:
    """Return the most computing time that the event loop's thread spent between two turns of this task.

    As in a run, what there was before is exempt from garbage collection: what other tests left takes it a second.
    """
    longest = 0.0
    with tuned_garbage_collection():
        before = time.thread_time()
        while not done.is_set():
            await asyncio.sleep(0.002)
            longest, before = max(longest, time.thread_time() - before), time.thread_time()
    return longest


async def step_all(
    environment: Environment, items: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[list[EnvStep | Failure], float]:
    """Return the results, sixteen at once, and the longest stall."""
    done, slots = asyncio.Event(), asyncio.Semaphore(16)
    watch = asyncio.create_task(longest_stall(done))

    async def step(text: str, state: dict[str, Any]) -> EnvStep | Failure:
        async with slots:
            messages = (Message("user", "?"), Message("assistant", text))
            return (await environment.step([messages], [{"response_truncated": False, **state}]))[0]

    try:
        results = await asyncio.gather(*(step(text, state) for text, state in items))
    finally:
        done.set()
        await environment.close()
    return list(results), await watch


def check_worthless(items: Sequence[tuple[str, dict[str, Any]]], results: Sequence[EnvStep | Failure]) -> None:
    for (text, state), result in zip(items, results, strict=True):
        where = f"{text[:80]!r} to {str(state)[:80]}"
        assert isinstance(result, EnvStep), f"{where}: {result}"
        assert sum(result.rewards.values()) <= 0, f"{where}: {result.rewards}"


@pytest.mark.timeout(560)
@pytest.mark.parametrize("tasks", PARTS)
def test_every_task_of_reasoning_gym(tasks: list[str], canary: Path) -> None:
    entries = {task: to_jsonable(reasoning_gym.create_dataset(task, size=1, seed=11)[0]) for task in tasks}
    items, right = [], []
    for task, entry in entries.items():
        check_entry(task, entry)
        state = {"task": task, "entry": entry}
        num_bombs = NUM_BOMBS if task in SYMBOLIC_TASKS else len(BOMBS)  # each costs a process
        responses = hostile_responses(str(canary), num_bombs=num_bombs)
        assert len(responses) >= 60
        items += [(f"<answer>{text}</answer>", state) for text in responses]
        if entry["answer"] is not None:
            right.append((f"<answer>{entry['answer']}</answer>", state))
    section = ReasoningGymEnvironmentConfig.model_validate({"num_workers": 2, "verify_timeout_s": 0.5})
    results, stall = asyncio.run(step_all(ReasoningGymEnvironment("reasoning_gym", section), [*items, *right]))
    check_worthless(items, results[: len(items)])
    assert stall < MAX_STALL_S
    assert os.listdir(canary) == []
    # The same processes still know a right answer of every task whose own answer its verifier accepts.
    for (_, state), result in zip(right, results[len(items) :], strict=True):
        verify = reasoning_gym.create_dataset(state["task"], size=1, seed=11).score_answer
        accepted = float(verify(state["entry"]["answer"].strip(), state["entry"]) >= 1.0)
        assert isinstance(result, EnvStep)
        assert result.rewards == {"reasoning_gym": accepted}, state


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("verifier", "boxed"),
    [
        pytest.param("math_verify", BOMBS, marks=pytest.mark.slow),  # each costs a process
        *(("math_verify", BOMBS[::4]), ("last_answer", BOMBS), ("choice", BOMBS)),
    ],
    ids=["math_verify, all bombs", "math_verify", "last_answer", "choice"],
)
def test_mathematics(verifier: str, boxed: Sequence[str], canary: Path) -> None:
    reference = {"math_verify": "\\frac{3}{7}", "last_answer": "377", "choice": "D"}[verifier]
    texts = hostile_responses(str(canary), num_bombs=NUM_BOMBS)
    texts += [f"\\boxed{{{text}}}" for text in (*boxed, "__import__('os').abort()")]
    items = [(text, {"answer": reference}) for text in texts]
    section = MathEnvironmentConfig.model_validate({"verifier": verifier, "verify_timeout_s": 0.5})
    results, stall = asyncio.run(step_all(MathEnvironment("math", section), items))
    check_worthless(items, results)
    assert stall < MAX_STALL_S
    assert os.listdir(canary) == []


@pytest.mark.timeout(300)
def test_environments_of_this_process(canary: Path) -> None:
    tools = ToolsEnvironmentConfig.model_validate({"tools": ["calculator", "python"], "cpu_s": 5, "wall_s": 20})
    puzzle = SlidingPuzzleEnvironmentConfig.model_validate({"invalid_move_penalty": 0.1})
    environments = {
        "tools": (ToolsEnvironment("tools", tools), {"answer": "377"}),
        "sliding_puzzle": (SlidingPuzzleEnvironment("puzzle", puzzle), generate_puzzle(3, 10, 0)),
        "reward_model": (RewardModelEnvironment(), {}),
    }
    for environment, state in environments.values():
        items = [(text, state) for text in hostile_responses(str(canary))]
        results, stall = asyncio.run(step_all(environment, items))
        check_worthless(items, results)
        assert stall < MAX_STALL_S
    assert os.listdir(canary) == []


@pytest.mark.timeout(300)
def test_rule_that_evaluates_responses_in_the_sandbox(canary: Path) -> None:
    """A user's rule may evaluate what the model wrote; in the sandbox that reaches nothing but its own verdict."""
    section = FunctionScorerConfig.model_validate(
        {"function": f"{custom.__name__}:evaluate_response", "sandboxed": True, "timeout_s": 3}
    )

    async def main() -> list[Any]:
        scorer = RuleScorer("rule", section)
        texts = [text for text in hostile_responses(str(canary)) if text not in BOMBS]
        try:
            requests = [ScoreRequest((Message("user", "?"), Message("assistant", text)), {}) for text in texts]
            return list(await scorer.score([*requests, ScoreRequest((Message("assistant", "40 + 2"),), {})]))
        finally:
            await scorer.close()

    scores = asyncio.run(main())
    assert scores[-1] == 42.0
    assert os.listdir(canary) == []


async def answer_as_server(path: str, body: dict[str, Any]) -> web.Response:
    """Judge everything alike, and quote what was asked."""
    if path == "/classify":
        return web.json_response({"data": [{"probs": [0.75, 0.25]}]})
    says = f"{body['messages'][-1]['content'][-200:]}\nScore: 3"
    return web.json_response({"choices": [{"message": {"content": says}}], "usage": {"total_tokens": 1}})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["judge", "classify"])
def test_scorers_that_a_server_computes(kind: str, canary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    chat_tokenizer().save_pretrained(model)
    requests = [
        ScoreRequest((Message("user", "?"), strip_tool_fields(Message("assistant", text))), {})
        for text in hostile_responses(str(canary))
    ]

    async def main() -> list[float | Failure | ResponseFault]:
        async with scoring_server(answer_as_server) as url:
            entry = {"base_urls": [url], "model": str(model), "limits": EndpointLimitsConfig(max_retries=0)}
            if kind == "judge":
                section = JudgeScorerConfig.model_validate({**entry, "prompt": "{{ response }}", "max_score": 10})
                scorer: Any = JudgeScorer("judge", section)
            else:
                scorer = ClassifyScorer("rm", ClassifyScorerConfig.model_validate({**entry, "api": "vllm_classify"}))
            try:
                return list(await scorer.score(requests))
            finally:
                await scorer.close()

    scores = asyncio.run(main())
    expected = 3.0 if kind == "judge" else 0.75
    assert all(score == expected or isinstance(score, ResponseFault) for score in scores), scores
    assert os.listdir(canary) == []


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small reward model."""
    directory = tmp_path_factory.mktemp("reward_model")
    save(directory)
    return directory


def model_scorer(kind: str, model: Path, url: str) -> Scorer:
    if kind == "over HTTP":
        return ClassifyScorer("rm", ClassifyScorerConfig(base_urls=[url], model=str(model)))
    section = RewardModelScorerConfig(
        model_name=str(model), device="cpu", in_actor=kind == "actor", packing=kind == "packed"
    )
    return RewardModelScorer("rm", section)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["thread", "packed", "actor", "over HTTP"])
def test_reward_models(kind: str, canary: Path, reward_model: Path) -> None:
    """Each response gets a finite score or is at fault itself, and changes the score of no other in its batch."""
    connect(num_cpus=2)
    texts = hostile_responses(str(canary))
    harmless = ScoreRequest((Message("user", "?"), Message("assistant", "377")), {})
    requests = [
        ScoreRequest((Message("user", "?"), strip_tool_fields(Message("assistant", text))), {}) for text in texts
    ]
    served = RewardModel("rm", RewardModelScorerConfig(model_name=str(reward_model), device="cpu"))

    async def classify(path: str, body: dict[str, Any]) -> web.Response:
        if len(body["input"]) > CONTEXT_LENGTH:
            text = f"This model's maximum context length is {CONTEXT_LENGTH} tokens."
            return web.json_response({"error": {"message": text}}, status=400)
        (score,) = await asyncio.to_thread(score_padded, served._model, [body["input"]])
        return web.json_response({"data": [{"probs": [score.item()]}]})

    async def main() -> tuple[list[Any], Any, float]:
        done = asyncio.Event()
        async with scoring_server(classify) as url:
            scorer = model_scorer(kind, reward_model, url)
            try:
                (alone,) = await scorer.score([harmless])
                watch = asyncio.create_task(longest_stall(done))
                scores = list(await scorer.score([*requests, harmless]))
                done.set()
                return scores, alone, await watch
            finally:
                await scorer.close()

    scores, alone, stall = asyncio.run(main())
    assert scores.pop() == pytest.approx(alone, abs=1e-5)
    for text, score in zip(texts, scores, strict=True):
        assert isinstance(score, ResponseFault) or (isinstance(score, float) and math.isfinite(score)), (
            text[:80],
            score,
        )
    assert sum(isinstance(score, float) for score in scores) >= 40
    assert stall < MAX_STALL_S
    assert os.listdir(canary) == []


PROGRAM = f"{ASK}print(said)\nreport(reward=0.0)\n"


async def ask_for_nothing(prompt: Prompt, base_url: str, api_key: str) -> float:
    await agents.ask(prompt, base_url, api_key)
    return 0.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["function", "command"])
def test_agents(kind: str, canary: Path) -> None:
    texts = [text for text in hostile_responses(str(canary)) if len(text) < 2000 and text.isprintable()]
    assert len(texts) >= 60
    program = CommandAgent("game", [sys.executable, "-S", "-c", PROGRAM])

    async def body(setup: agents.Setup) -> None:
        for text in texts:
            setup.generation._say = lambda request, history, text=text: text
            (trajectory,) = await setup.run(jobs(1))
            assert (trajectory.failure, trajectory.rewards) == (None, {"game": 0.0}), text

    agents.use(program if kind == "command" else ask_for_nothing, body, max_new_tokens=4096, max_model_len=8192)
    assert os.listdir(canary) == []
