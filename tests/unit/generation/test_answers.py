import asyncio
from contextlib import aclosing

import pytest

from nemo_rl.generation.engines import as_completed
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingParams(max_new_tokens=1), seed=0, session_id=name)


class Engine:
    """Answers a request when it is let go."""

    def __init__(self, *names: str) -> None:
        self.gates = {name: asyncio.Event() for name in names}
        self.ended: list[str] = []

    async def answer(self, asked: GenerationRequest) -> Completion | FailedRequest:
        try:
            await self.gates[asked.request_id].wait()
        finally:
            self.ended.append(asked.request_id)
        if asked.request_id == "broken":
            raise ZeroDivisionError
        return FailedRequest(asked.request_id, "a test")


def test_answers_come_as_they_finish_and_closing_ends_the_rest() -> None:
    async def main() -> tuple[list[str], list[str]]:
        engine, seen = Engine("a", "b", "c"), []
        engine.gates["c"].set()
        async with aclosing(as_completed([request(name) for name in "abc"], engine.answer)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                seen.append(answer.request_id)
                if len(seen) == 2:
                    break
                engine.gates["b"].set()
        return seen, engine.ended

    assert asyncio.run(main()) == (["c", "b"], ["c", "b", "a"])


@pytest.mark.parametrize("names", [("broken",), ("broken", "other")])
def test_what_an_answer_raises_is_raised_and_ends_the_rest(names: tuple[str, ...]) -> None:
    async def main() -> list[str]:
        engine = Engine(*names)
        engine.gates["broken"].set()
        answers = as_completed([request(name) for name in names], engine.answer)
        with pytest.raises(ZeroDivisionError):
            await anext(answers)
        return engine.ended

    assert asyncio.run(main()) == list(names)
