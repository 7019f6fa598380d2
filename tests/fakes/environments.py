"""Environments without a task: what they answer is a function of the conversation and the state."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nemo_rl.types import EnvStep, Failure, FailureClass, Message

Conversation: TypeAlias = Sequence[Message]
State: TypeAlias = Mapping[str, Any]


class FakeEnvironment:
    """Answers each item by `answer(conversation, state)`; remembers the conversations and states of every call.

    `before(conversations)` is awaited first: a latency, an error of the whole call, a hang.
    """

    def __init__(
        self,
        answer: Callable[[Conversation, State], EnvStep | Failure] | None = None,
        *,
        before: Callable[[Sequence[Conversation]], Awaitable[None]] | None = None,
    ) -> None:
        self.calls: list[tuple[list[Conversation], list[State]]] = []
        self.is_closed = False
        self._answer = answer or reward_by_length
        self._before = before

    async def step(self, conversations: Sequence[Conversation], states: Sequence[State]) -> list[EnvStep | Failure]:
        self.calls.append((list(conversations), list(states)))
        if self._before is not None:
            await self._before(conversations)
        return [self._answer(c, s) for c, s in zip(conversations, states, strict=True)]

    async def close(self) -> None:
        self.is_closed = True


def reward_by_length(conversation: Conversation, state: State) -> EnvStep:
    """End at once; the reward is the length of the answer."""
    return EnvStep(rewards={"length": float(len(conversation[-1].content))})


def never_done(conversation: Conversation, state: State) -> EnvStep:
    """Rewards each turn with 1 and goes on for ever."""
    return EnvStep(observation=(Message("user", "goOn"),), rewards={"turn": 1.0}, done=False, state=state)


async def hang(conversations: Sequence[Conversation]) -> None:
    """Never answers."""
    await asyncio.Event().wait()


def draws_of(*identity: object) -> random.Random:
    """Random numbers that depend on the arguments alone."""
    return random.Random(hashlib.sha256(repr(identity).encode()).digest())


def episodic(salt: int, *, failing_share: float = 0.0) -> Callable[[Conversation, State], EnvStep | Failure]:
    """Random episodes: several rewards, empty and long observations, stop strings, a state that grows, failed items."""

    def answer(conversation: Conversation, state: State) -> EnvStep | Failure:
        draws = draws_of(salt, [(m.role, m.content) for m in conversation], sorted(state.items()))
        if draws.random() < failing_share:
            return Failure(FailureClass.ENVIRONMENT, f"item {draws.randrange(1000)} was made to fail")
        observation = tuple(
            Message(draws.choice(("user", "tool")), "o" * draws.choice((0, 1, 3, 12)))
            for _ in range(draws.randrange(3))
        )
        names = draws.sample(("format", "correct", "style"), draws.randrange(4))
        return EnvStep(
            observation=observation,
            rewards={name: draws.choice((-1.0, 0.0, 0.25, 1.0)) for name in names},
            done=draws.random() < 0.3,
            state={**state, "turn": state.get("turn", 0) + 1},
            stop_strings=draws.choice((None, (), ("ab",), ("x", "yz"))),
            answer=draws.choice((None, "left", "right")),
        )

    return answer
