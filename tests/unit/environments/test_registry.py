"""Environments by name and by dotted path: entries, classes, NeMo-RL classes and functions."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.environments.registry import make_environment
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message
from tests.unit.environments.custom import EchoEnvironment

CUSTOM = "tests.unit.environments.custom"


def step_once(
    name: str, entry: Mapping[str, Any], texts: Sequence[str], states: Sequence[Mapping[str, Any]]
) -> list[EnvStep | Failure]:
    async def main() -> list[EnvStep | Failure]:
        environment = make_environment(name, ENVIRONMENTS.read(dict(entry), name, key=f"env.{name}"))
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for text in texts]
            return list(await environment.step(conversations, states))
        finally:
            await environment.close()

    return asyncio.run(main())


@pytest.mark.parametrize("path", [f"{CUSTOM}:length_reward", f"{CUSTOM}.length_reward"])
def test_function_by_dotted_path_gives_a_reward_and_fails_items_alone(path: str) -> None:
    good, broken = step_once("length", {"type": path}, ["abcd", "ab"], [{"target": 8}, {"break": True}])
    assert good == EnvStep(rewards={"length": 0.5}, state={"target": 8})
    assert broken == Failure(FailureClass.REWARD, "KeyError: 'broken'")


def test_function_that_takes_too_long_fails_its_item_alone() -> None:
    slow, quick = step_once("f", {"type": f"{CUSTOM}:waits", "timeout_s": 2}, ["x"] * 2, [{"wait": True}, {}])
    assert slow == Failure(FailureClass.REWARD, "TimeoutError: no answer in 2 s")
    assert quick == EnvStep(rewards={"f": 1.0})


def test_async_function_gives_a_reward() -> None:
    assert step_once("f", {"type": f"{CUSTOM}:async_reward"}, ["x"], [{}]) == [EnvStep(rewards={"f": 0.5})]


def test_function_gives_several_named_rewards() -> None:
    state = {"answer": "7"}
    short, long = step_once("f", {"type": f"{CUSTOM}:two_rewards"}, ["7", "it is certainly 8"], [state, state])
    assert isinstance(short, EnvStep)
    assert isinstance(long, EnvStep)
    assert short.rewards == {"correct": 1.0, "short": 0.25}
    assert long.rewards == {"correct": 0.0, "short": 0.0}


def test_reward_that_is_no_finite_number_fails_its_item() -> None:
    states = [{"kind": "nan"}, {"kind": "text"}, {"kind": "none"}]
    results = step_once("f", {"type": f"{CUSTOM}:bad_reward"}, ["x"] * 3, states)
    assert all(isinstance(r, Failure) and r.failure_class is FailureClass.REWARD for r in results)
    assert results[0] == Failure(FailureClass.REWARD, "reward 'f' is nan, not a finite number")


def test_class_by_dotted_path_is_made_with_its_kwargs() -> None:
    entry = {"type": f"{CUSTOM}:EchoEnvironment", "kwargs": {"num_turns": 2}}
    (step,) = step_once("echo", entry, ["hello"], [{}])
    assert step == EnvStep((Message("user", "hello"),), rewards={"echo": 1.0}, done=False, state={"turn": 2})


def test_class_that_answers_one_conversation_fails_items_alone() -> None:
    entry = {"type": f"{CUSTOM}:WithoutClose", "timeout_s": 0.2, "retries": {"max_retries": 0}}
    good, broken, slow = step_once("one", entry, ["four", "x", "x"], [{"a": 1}, {"break": True}, {"wait": True}])
    assert good == EnvStep(rewards={"length": 4.0}, state={"a": 1})
    assert broken == Failure(FailureClass.ENVIRONMENT, "KeyError: 'broken'")
    assert slow == Failure(FailureClass.ENVIRONMENT, "TimeoutError")


def test_nemo_rl_environment_class_is_adapted() -> None:
    entry = {"type": f"{CUSTOM}:GuessEnvironment", "kwargs": {"cfg": {"number": 7}}}
    right, wrong = step_once("guess", entry, ["7", "8"], [{}, {"tries": 1}])
    assert right == EnvStep((Message("user", "right"),), rewards={"guess": 1.0}, done=True, answer="7")
    assert wrong == EnvStep(
        (Message("user", "wrong"),),
        rewards={"guess": 0.0},
        done=False,
        state={"tries": 2},
        stop_strings=(".",),
        answer="8",
    )


def test_nemo_rl_environment_with_several_rewards() -> None:
    entry = {"type": f"{CUSTOM}:TwoRewardsEnvironment", "kwargs": {"cfg": {"number": 7}}}
    (step,) = step_once("guess", entry, ["7"], [{}])
    assert isinstance(step, EnvStep)
    assert step.rewards == {"reward1": 1.0, "reward2": 0.5}


def test_entry_by_dotted_path_brings_section_check_and_factory() -> None:
    entry = {"type": f"{CUSTOM}:SHOUT", "mark": "?"}
    (step,) = step_once("shout", entry, ["hello"], [{}])
    assert isinstance(step, EnvStep)
    assert step.observation == (Message("user", "hello?"),)
    section = ENVIRONMENTS.read({**entry, "mark": ""}, "shout", key="env.shout")
    found = ENVIRONMENTS.entry(section.type, key="env.shout.type")
    assert found.check is not None
    with pytest.raises(ConfigError, match="must not be empty"):
        found.check("env.shout", section, None)


def test_registered_name_is_found() -> None:
    ENVIRONMENTS.register("echo_for_test")(EchoEnvironment)
    try:
        (step,) = step_once("mine", {"type": "echo_for_test"}, ["hi"], [{}])
    finally:
        del ENVIRONMENTS.registered["echo_for_test"]
    assert isinstance(step, EnvStep)
    assert step.observation == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        ("maths", {}, r"did you mean math\?"),
        ("x", {"type": "nothing_like_it"}, "known: .*math.*reasoning_gym.*sliding_puzzle.*tools"),
        ("x", {"type": f"{CUSTOM}:length_rewards"}, r"did you mean length_reward\?"),
        ("x", {"type": "no_such_package.module:f"}, "cannot be imported"),
        ("x", {"type": f"{CUSTOM}:NOT_CALLABLE"}, "neither a class nor a function"),
        ("x", {"type": f"{CUSTOM}:EnvironmentReturn"}, "no method `step`"),
        ("x", {"type": f"{CUSTOM}:BlockingStep"}, "`step` must be `async def`"),
        ("x", {"type": f"{CUSTOM}:BlockingClose"}, "`close` must be `async def`"),
        ("x", {"type": ":length_reward"}, "no dotted path"),
        ("x", {"type": ".custom"}, "no dotted path"),
        ("x", {"type": f"{CUSTOM}:EchoEnvironment", "kwargs": {"turns": 2}}, "turns"),
        ("x", {"type": f"{CUSTOM}:GuessEnvironment"}, "cfg"),
        ("x", {"type": f"{CUSTOM}:async_reward", "kwargs": {"a": 1}}, "a function takes none"),
    ],
)
def test_what_cannot_be_made_is_a_config_error(name: str, entry: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_environment(name, ENVIRONMENTS.read(entry, name, key=f"env.{name}"))


def test_module_with_a_syntax_error_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished_environment.py").write_text("def reward(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'unfinished_environment' cannot be imported: .*line 1"):
        make_environment("x", ENVIRONMENTS.read({"type": "unfinished_environment:reward"}, "x", key="env.x"))
