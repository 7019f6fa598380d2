"""An OpenEnv server that asks to spell a word backward: python examples/ecosystem/openenv_server.py --port 8000."""

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app  # pyright: ignore[reportMissingImports]

MAX_TRIES = 2


class Say(Action):
    """What the policy wrote."""

    message: str


class Hint(Observation):
    """What the policy reads next."""

    text: str


class Speller(Environment):
    """1 for the right spelling; a wrong one costs 0.1 and may be tried again, twice at most."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word = ""
        self._tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, word: str = "", **options: Any) -> Hint:
        self._word, self._tries = word, 0
        return Hint(text="")

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Hint:
        assert isinstance(action, Say)
        self._tries += 1
        if action.message.strip() == self._word[::-1]:
            return Hint(text="right", done=True, reward=1.0)
        return Hint(text="wrong", done=self._tries == MAX_TRIES, reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


def make_app() -> Any:
    return create_fastapi_app(Speller, Say, Hint, max_concurrent_envs=1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(make_app(), host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
