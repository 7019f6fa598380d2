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
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.scorers.checked_scorer import CheckedScorer, score_each
from nemo_rl.environments.user_code import contain_exit
from nemo_rl.errors import ConfigError, UserExitError
from nemo_rl.experience.cancellation import run_async
from nemo_rl.observability.user_code_record import UserCodeRecord, UserCodeSeen
from nemo_rl.types import EnvStep, Failure, FailureClass, Message, ScoreRequest
from tests.support.quick import quick

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
@pytest.mark.parametrize("name", quick(["ends", "EndsEnvironment"], ["ends"]))
def test_isolated_code_that_dies_or_blocks_fails_its_own_item(name: str) -> None:
    hows = ["os._exit", "", "abort", "exit", "", "block", ""]
    results = step(read(name, isolated=True, timeout_s=10), hows)
    died, fine, aborted, exits, _, blocked, _ = results
    assert [result for how, result in zip(hows, results, strict=True) if how == ""] == [fine] * 3
    assert isinstance(fine, EnvStep)
    for failure in (died, aborted):
        assert isinstance(failure, Failure)
        assert "make_step: its process died" in failure.cause
    assert isinstance(exits, Failure)
    assert exits.cause == EXIT
    assert isinstance(blocked, Failure)
    assert "did not finish in 10 s" in blocked.cause


WAYS_TO_END_A_LOOP = ("stop", "cancel all", "cancel all, errors ignored", "cancel all from a task", "cancel itself")


@pytest.mark.parametrize("name", ["ends_loop", "EndsLoopEnvironment"])
@pytest.mark.parametrize("how", WAYS_TO_END_A_LOOP)
def test_code_that_ends_the_loop_or_its_tasks_fails_its_own_rollout(name: str, how: str) -> None:
    hows = ("", how, "legitimate", "stop later")

    async def main() -> list[EnvStep | Failure]:
        environment = make_environment("mine", read(name))
        calls = [environment.step([(Message("assistant", "a"),)], [{"how": each}]) for each in hows]
        results = await asyncio.gather(*calls)
        await environment.close()
        return [result for (result,) in results]

    first, failed, *others = run_async(main())
    assert isinstance(failed, Failure)
    assert failed.cause.startswith("UserExitError: user code ")
    assert failed.cause.endswith(", which ends no run")
    assert [type(each) for each in (first, *others)] == [EnvStep] * 3


@pytest.mark.parametrize("how", WAYS_TO_END_A_LOOP)
def test_code_that_ends_the_loop_fails_its_own_item_of_a_call(how: str) -> None:
    async def main() -> Sequence[EnvStep | Failure]:
        environment = make_environment("mine", read("ends_loop"))
        conversations = [(Message("assistant", "a"),)] * 3
        return await environment.step(conversations, [{"how": ""}, {"how": how}, {"how": "legitimate"}])

    fine, failed, other = run_async(main())
    assert isinstance(failed, Failure)
    assert [type(fine), type(other)] == [EnvStep] * 2


def test_cancellation_of_a_rollout_and_a_deadline_still_reach_user_code() -> None:
    ended: list[str] = []

    async def user_code() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(contain_exit(user_code()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await contain_exit(user_code())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(contain_exit(user_code()), 0.01)

    run_async(main())
    assert ended == ["cancelled"] * 3


DIES = """
import asyncio, sys
from pathlib import Path
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.environments.registry import make_environment
from nemo_rl.observability.user_code_record import USER_CODE
from nemo_rl.types import Message
USER_CODE.open(Path(sys.argv[1]))
section = ENVIRONMENTS.read({"type": "tests.unit.environments.custom:" + sys.argv[2]}, "mine", key="env.mine")
state = {"how": sys.argv[3]}
asyncio.run(make_environment("mine", section).step([(Message("assistant", "a"),)] * 2, [{"how": ""}, state]))
"""


@pytest.mark.parametrize("name", ["ends", "ends_async", "EndsEnvironment"])
def test_user_code_that_ends_its_process_is_named_to_the_next(tmp_path: Path, name: str) -> None:
    for how in ("os._exit", "abort", "terminate"):
        words = [sys.executable, "-c", DIES if name != "EndsEnvironment" else DIES.replace('{"how": ""}', "state")]
        subprocess.run([*words, str(tmp_path), name, how], cwd=Path(__file__).parents[3], check=False)
        seen = UserCodeRecord().open(tmp_path)
        assert seen == UserCodeSeen(f"{CUSTOM}:{name}", f"{CUSTOM}:{name}"), how


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
from nemo_rl.environments.user_code import contain_exit
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
