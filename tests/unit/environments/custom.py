"""Environments and reward functions as a user writes them, found by the tests through their dotted paths."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Message


def length_reward(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    if metadata.get("break"):
        raise KeyError("broken")
    return len(messages[-1]["content"]) / metadata["target"]


async def async_reward(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return 0.5


def two_rewards(messages: list[dict[str, str]], metadata: dict[str, Any]) -> dict[str, float]:
    """Rewards of several kinds: the content and the form, kept apart by name."""
    text = messages[-1]["content"]
    return {"correct": float(metadata["answer"] in text), "short": 0.25 if len(text) < 10 else 0.0}


def bad_reward(messages: list[dict[str, str]], metadata: dict[str, Any]) -> Any:
    return {"nan": float("nan"), "text": "high", "none": None}[metadata["kind"]]


def waits(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    if metadata.get("wait"):
        threading.Event().wait()
    return 1.0


def ends(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    """End what calls it, in the way that the state names."""
    match metadata.get("how"):
        case "exit":
            sys.exit(0)
        case "interrupt":
            raise KeyboardInterrupt
        case "os._exit":
            os._exit(0)
        case "abort":
            os.abort()
        case "block":
            threading.Event().wait()
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
    return 1.0


async def ends_async(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return ends(messages, metadata)


async def ends_loop(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    """End the event loop or the tasks on it, in the way that the state names."""
    await asyncio.sleep(0.05)  # until all items run
    how, task = metadata.get("how"), asyncio.current_task()
    assert task is not None
    if how == "stop":
        asyncio.get_running_loop().stop()
    elif how == "stop later":
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(0.05)
    elif how == "cancel all":
        for each in asyncio.all_tasks():
            each.cancel()
    elif how == "cancel all, errors ignored":
        for each in asyncio.all_tasks():
            with contextlib.suppress(Exception):
                each.cancel()
        await asyncio.sleep(0.05)
    elif how == "cancel all from a task":
        await asyncio.create_task(ends_loop(messages, {"how": "cancel all"}))
    elif how == "cancel itself":
        task.cancel()
    elif how == "legitimate":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        own = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        own.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    await asyncio.sleep(0.05)
    return 1.0


class EndsLoopEnvironment:
    """Our own protocol: `ends_loop` of the state of its first item."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        await ends_loop([], dict(states[0]))
        return [EnvStep(rewards={"mine": 1.0})] * len(conversations)

    async def close(self) -> None:
        pass


class EndsEnvironment:
    """Our own protocol: ends the process in the way that the state of its first item names."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        ends([], dict(states[0]))
        return [EnvStep(rewards={"fine": 1.0})] * len(conversations)

    async def close(self) -> None:
        pass


NOT_CALLABLE = 3


class EchoEnvironment:
    """Our own protocol: says the message back, and is done after `num_turns`."""

    def __init__(self, num_turns: int = 1) -> None:
        self._num_turns = num_turns

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        return [
            EnvStep(
                observation=(Message("user", conversation[-1].content),),
                rewards={"echo": 1.0},
                done=state.get("turn", 1) >= self._num_turns,
                state={**state, "turn": state.get("turn", 1) + 1},
            )
            for conversation, state in zip(conversations, states, strict=True)
        ]

    async def close(self) -> None:
        pass


class ShoutConfig(EnvironmentConfig):
    """A section of an entry's own."""

    mark: str = "!"


class Shout(EchoEnvironment):
    """Says the message back with a mark at its end."""

    def __init__(self, section: ShoutConfig) -> None:
        super().__init__()
        self._mark = section.mark

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        observations = [Message("user", conversation[-1].content + self._mark) for conversation in conversations]
        return [EnvStep(observation=(observation,), rewards={"shout": 1.0}) for observation in observations]


def check_shout(key: str, section: ShoutConfig, config: object) -> None:
    if not section.mark:
        raise ConfigError(f"{key}.mark", section.mark, "must not be empty")


SHOUT = Entry(ShoutConfig, make=lambda name, section: Shout(section), check=check_shout)


class BlockingStep(EchoEnvironment):
    """A mistake: `step` of our protocol without async."""

    def step(self, conversations: Any, states: Any) -> list[EnvStep]:  # type: ignore[override]
        return [EnvStep()]


class WithoutClose:
    """Nothing to end; one conversation at a time."""

    async def step(self, conversation: Any, state: Any) -> EnvStep:
        if state.get("break"):
            raise KeyError("broken")
        if state.get("wait"):
            await asyncio.Event().wait()
        return EnvStep(rewards={"length": float(len(conversation[-1].content))}, state=state)


class BlockingClose(WithoutClose):
    """A mistake."""

    def close(self) -> None:
        pass


class EnvironmentReturn(NamedTuple):
    """NeMo-RL's."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: Any  # a tensor
    terminateds: Any
    answers: list[str | None] | None = None


class GuessEnvironment:
    """A NeMo-RL environment: guess the number."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg

    def step(self, message_log_batch: list[list[dict[str, str]]], metadata: list[Any]) -> EnvironmentReturn:
        import torch  # here, so that the other parts of this file load quickly in other processes

        guesses = [log[-1]["content"] for log in message_log_batch]
        right = [guess == str(self.cfg["number"]) for guess in guesses]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "right" if r else "wrong"} for r in right],
            metadata=[
                None if r else {**m, "tries": m.get("tries", 0) + 1} for r, m in zip(right, metadata, strict=True)
            ],
            next_stop_strings=[None if r else ["."] for r in right],
            rewards=torch.tensor(right, dtype=torch.float32),
            terminateds=torch.tensor(right),
            answers=list(guesses),
        )


class TwoRewardsEnvironment(GuessEnvironment):
    """Rewards of shape [B, 2]."""

    def step(self, message_log_batch: list[list[dict[str, str]]], metadata: list[Any]) -> EnvironmentReturn:
        import torch

        returned = super().step(message_log_batch, metadata)
        return returned._replace(rewards=torch.stack([returned.rewards, returned.rewards / 2], dim=1))


def hang_or_die(what: str) -> str:
    """Run in a pool's process, and not always come back."""
    if what == "hang":
        while True:
            pass
    if what == "die":
        os._exit(1)
    if what == "raise":
        raise KeyError("lost")
    return what


def evaluate_response(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    """Evaluate a response, which belongs in the sandbox."""
    return float(eval(messages[-1]["content"]))
