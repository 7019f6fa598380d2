"""User code that ends processes: `sys.exit`, KeyboardInterrupt, `os._exit`, a crash, a block. The run survives."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import contain_exit
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.scorers.registry import CheckedScorer, score_each
from nemo_rl.errors import ConfigError, UserExitError
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

CUSTOM = "tests.unit.environments.custom"
EXIT = "UserExitError: user code raised SystemExit(0), which ends no run"
INTERRUPT = "UserExitError: user code raised KeyboardInterrupt(), which ends no run"


def read(name: str, **options: object) -> EnvironmentConfig:
    return ENVIRONMENTS.read({"type": f"{CUSTOM}:{name}", **options}, "mine", key="env.mine")


def step(section: EnvironmentConfig, hows: Sequence[str]) -> list[EnvStep | Failure]:
    async def main() -> list[EnvStep | Failure]:
        environment = make_environment("mine", section)
        try:
            conversations = [(Message("assistant", "a"),)] * len(hows)
            return list(await environment.step(conversations, [{"how": how} for how in hows]))
        finally:
            await environment.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["ends", "ends_async"])
def test_exit_and_interrupt_of_a_function_fail_their_own_item(name: str) -> None:
    exits, interrupts, fine = step(read(name), ["exit", "interrupt", ""])
    assert exits == Failure(FailureClass.REWARD, EXIT)
    assert interrupts == Failure(FailureClass.REWARD, INTERRUPT)
    assert isinstance(fine, EnvStep)
    assert fine.rewards == {"mine": 1.0}


@pytest.mark.parametrize(("how", "cause"), [("exit", EXIT), ("interrupt", INTERRUPT)])
def test_exit_of_a_class_fails_the_items_of_its_call(how: str, cause: str) -> None:
    assert step(read("EndsEnvironment"), [how, ""]) == [Failure(FailureClass.ENVIRONMENT, cause)] * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["ends", "EndsEnvironment"])
def test_isolated_code_that_dies_or_blocks_fails_its_own_item(name: str) -> None:
    hows = ["os._exit", "", "abort", "exit", "", "block", ""]
    results = step(read(name, isolated=True, timeout_s=10), hows)
    died, fine, aborted, exits, _, blocked, _ = results
    assert [result for how, result in zip(hows, results, strict=True) if how == ""] == [fine] * 3
    assert isinstance(fine, EnvStep)
    for failure in (died, aborted):
        assert isinstance(failure, Failure)
        assert failure.cause.endswith("step_in_process: its process died")
    assert isinstance(exits, Failure)
    assert exits.cause == EXIT
    assert isinstance(blocked, Failure)
    assert "did not finish in 10 s" in blocked.cause


def test_isolated_environment_in_actors_is_refused() -> None:
    section = read("ends", isolated=True, remote={"enabled": True})
    with pytest.raises(ConfigError, match=r"env\.mine\.isolated = True: an environment in Ray actors"):
        make_environment("mine", section)


class EndsScorer:
    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        sys.exit(0)

    async def close(self) -> None:
        pass


async def interrupted_score(request: ScoreRequest) -> float:
    raise KeyboardInterrupt


def test_exit_of_a_scorer_fails_its_requests() -> None:
    request = ScoreRequest(messages=(Message("assistant", "a"),), metadata={})
    scores = asyncio.run(CheckedScorer(EndsScorer(), timeout_s=60).score([request]))
    assert scores == [Failure(FailureClass.REWARD, EXIT)]
    assert asyncio.run(score_each([request], interrupted_score)) == [Failure(FailureClass.REWARD, INTERRUPT)]


def test_exit_in_a_thread_is_no_exit() -> None:
    async def main() -> None:
        with pytest.raises(UserExitError, match=r"SystemExit\(3\)"):
            await BlockingCalls("test", 1).run(lambda: sys.exit(3))

    asyncio.run(main())


CTRL_C = """
import asyncio, sys
from nemo_rl.environments.boundary import contain_exit
async def user_code():
    print("running", flush=True)
    while True:
        await asyncio.sleep(0)
asyncio.run(contain_exit(user_code()))
"""


@pytest.mark.parametrize("handler", ["", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"])
def test_real_interrupt_still_ends_the_program(handler: str) -> None:
    code = CTRL_C.replace("    print", "    " + handler.strip() + "\n    print") if handler else CTRL_C
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        for _ in range(12):  # one interrupt may fall where Python ignores exceptions, such as in a finalizer
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                break
        assert process.poll() in (-signal.SIGINT, 130, 1)
    finally:
        process.kill()  # where it has not ended, it would compute for ever
        process.wait()
        process.stdout.close()


def test_interrupt_of_user_code_is_contained() -> None:
    async def user_code() -> None:
        raise KeyboardInterrupt

    with pytest.raises(UserExitError):
        asyncio.run(contain_exit(user_code()))
