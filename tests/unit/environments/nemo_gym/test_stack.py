"""A stack that is started, watched and ended, with a stand-in for Gym itself."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.client import GymClient, open_gym_client
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig, ServedPolicy
from nemo_rl.environments.nemo_gym.reply import GymInvalidReply, GymRefused, GymStackEnded, GymUnavailable
from nemo_rl.environments.nemo_gym.stack import RAY_STARTS, GymStack
from nemo_rl.errors import ConfigError
from nemo_rl.tracing import Tracer
from tests.unit.environments.nemo_gym.fake_python import fake_environment
from tests.unit.environments.nemo_gym.processes import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted by Linux's prctl")


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NemoGymConfig]:
    """`section(mode, ...)`: a stack of the stand-in, run from an empty directory."""
    python = fake_environment(tmp_path / "environment")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = "{entrypoint: app.py, return_token_id_information: false}"
    Path("own.yaml").write_text(f"policy_model: {{responses_api_models: {{mine: {model}}}}}")

    def make(mode: str, **settings: Any) -> NemoGymConfig:
        values = {"config_paths": ["own.yaml"], "python": str(python), "overrides": {"mode": mode}, **settings}
        return NemoGymConfig(**values)

    return make


async def start(section: NemoGymConfig, run_dir: Path) -> GymStack:
    return await GymStack.start(
        section,
        policy=ServedPolicy(["http://a/v1", "http://b/v1"], api_key="k", model_name="policy"),
        run_dir=run_dir,
    )


def pids(run_dir: Path) -> list[int]:
    return [int(pid) for pid in (run_dir / "nemo_gym" / "pids").read_text().split()]


def with_stack(section: NemoGymConfig, run_dir: Path, use: Callable[[GymStack], Awaitable[None]]) -> None:
    async def run() -> None:
        stack = await start(section, run_dir)
        try:
            await use(stack)
        finally:
            await stack.close()
            await stack.close()

    asyncio.run(run())


def test_a_started_stack_answers_and_leaves_nothing(section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        stack.check()
        assert all(map(is_alive, pids(tmp_path)))
        settings = section("serves")
        client = GymClient(settings, started=stack)
        await client.connect(["agent"], check=stack.check)
        await client.close()

    with_stack(section("serves"), tmp_path, use)
    assert not any(map(is_alive, pids(tmp_path)))
    written = OmegaConf.load(tmp_path / "nemo_gym" / "env.yaml")
    assert list(written.policy_base_url) == ["http://a/v1", "http://b/v1"]
    assert (written.policy_api_key, written.policy_model_name, written.mode) == ("k", "policy", "serves")
    assert written.policy_model.responses_api_models.mine.return_token_id_information is True
    assert list(written.config_paths) == [str(tmp_path / "here" / "own.yaml")]
    assert (written.port_range_low, written.port_range_high) == (10_001, 20_000)
    assert "stand-in" in (tmp_path / "nemo_gym" / "gym.log").read_text()


def test_a_relative_run_directory_is_written_as_an_absolute_path(section: Any, tmp_path: Path) -> None:
    """Servers of Gym resolve the path in directories of their own."""

    async def use(stack: GymStack) -> None:
        directory = tmp_path / "here" / "runs" / "nemo_gym"
        written = OmegaConf.load(directory / "env.yaml")
        assert written.uv_venv_dir == str(directory / "environments")
        assert stack.log_file == directory / "gym.log"

    with_stack(section("serves"), Path("runs"), use)


def test_a_stack_keeps_the_bytecode_of_what_it_imports(
    section: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(stack: GymStack) -> None:
        assert "PYTHONDONTWRITEBYTECODE" not in psutil.Process(pids(tmp_path)[0]).environ()

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with_stack(section("serves"), tmp_path, use)


def test_a_traced_run_has_its_stack_send_spans_to_the_same_collector(
    section: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, variable = "http://collector:4318/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    monkeypatch.delenv(variable, raising=False)

    def started(name: str, **settings: Any) -> tuple[dict[str, str], bool]:
        found: list[dict[str, str]] = []

        async def use(stack: GymStack) -> None:
            found.append(psutil.Process(pids(tmp_path / name)[0]).environ())

        with_stack(section("serves", **settings), tmp_path / name, use)
        return found[0], (Path(found[0]["PYTHONPATH"].split(os.pathsep)[0]) / "sitecustomize.py").is_file()

    variables, is_traced = started("untraced")
    assert (variable in variables, is_traced) == (False, False)
    with Tracer([], collector=address):
        variables, is_traced = started("traced")
        assert (variables[variable], variables["OTEL_TRACES_SAMPLER"], is_traced) == (
            address,
            "parentbased_always_off",
            True,
        )
        variables, is_traced = started("own telemetry", overrides={"mode": "serves", "telemetry": {"enabled": True}})
        assert (variable in variables, is_traced) == (False, False)


def test_the_head_of_another_stack_is_not_taken_for_ours(section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        overrides = {"mode": "late", "head_server": {"port": int(stack.head_url.rpartition(":")[2])}}
        with pytest.raises(GymInvalidReply, match="the head server of another stack listens there"):
            await start(section("late", overrides=overrides), tmp_path / "second")

    with_stack(section("serves"), tmp_path / "first", use)


def test_overrides_win_over_what_we_say(section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        written = OmegaConf.load(tmp_path / "nemo_gym" / "env.yaml")
        assert (written.policy_model_name, written.port_range_low) == ("other", 5)

    overrides = {"mode": "serves", "policy_model_name": "other", "port_range_low": 5}
    with_stack(section("serves", overrides=overrides), tmp_path, use)


def test_a_stack_that_dies_at_start_shows_the_end_of_its_log(section: Any, tmp_path: Path) -> None:
    with pytest.raises(GymStackEnded) as error:
        asyncio.run(start(section("dies"), tmp_path))
    assert str(error.value).count("; the end of ") == 1
    assert "the stack has ended with status 1; the end of " in str(error.value)
    assert str(error.value).endswith("this is the stand-in of NeMo Gym\nno such key: policy_modle_name")


@pytest.mark.parametrize(("own", "limit"), [(None, "9"), ("7", "7")])
def test_gyms_ray_may_take_a_fourth_of_the_stacks_time(
    own: str | None, limit: str, section: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_raylet_start_wait_time_s", raising=False)
    if own is not None:
        monkeypatch.setenv("RAY_raylet_start_wait_time_s", own)

    async def use(stack: GymStack) -> None:
        assert (tmp_path / "nemo_gym" / "limit").read_text() == limit

    with_stack(section("serves", start_timeout_s=32.5), tmp_path, use)


@pytest.mark.parametrize("late_rays", [RAY_STARTS - 1, RAY_STARTS])
def test_a_stack_whose_ray_is_late_is_started_again(late_rays: int, section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        stack.check()

    late = section("serves", overrides={"mode": "serves", "late_rays": late_rays})
    if late_rays < RAY_STARTS:
        with_stack(late, tmp_path, use)
    else:
        with pytest.raises(GymStackEnded, match="The current node timed out during startup"):
            asyncio.run(start(late, tmp_path))
    assert (tmp_path / "nemo_gym" / "starts").read_text() == "." * RAY_STARTS


def test_a_stack_that_is_late_is_ended_and_shows_its_log(section: Any, tmp_path: Path) -> None:
    with pytest.raises(GymUnavailable) as error:
        asyncio.run(start(section("late", start_timeout_s=3.0), tmp_path))
    assert "not up within env.nemo_gym.start_timeout_s = 3 s; no response from its head server" in str(error.value)
    file = tmp_path / "nemo_gym" / "pids"
    assert not file.exists() or not any(map(is_alive, pids(tmp_path)))


def test_a_stack_that_dies_later_is_noticed_with_all_that_is_left_of_it(section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(GymStackEnded, match="the stack has ended with status 137"):
            wait_until("its end is noticed", lambda: stack.check())
        assert not any(map(is_alive, pids(tmp_path)))

    with_stack(section("serves"), tmp_path, use)


def test_rows_end_with_the_stack_that_their_client_has_started(section: Any, tmp_path: Path) -> None:
    async def run() -> None:
        policy = ServedPolicy("http://a/v1", api_key="k", model_name="policy")
        async with AsyncExitStack() as stack:
            client = await open_gym_client(
                "gym", section("serves"), agents=["agent"], policy=policy, run_dir=tmp_path, stack=stack
            )
            with pytest.raises(GymRefused, match="HTTP 501"):  # the stand-in runs no rows
                await client.run("agent", {})
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
            with pytest.raises(GymStackEnded):
                await client.run("agent", {})

    asyncio.run(run())
    assert not any(map(is_alive, pids(tmp_path)))


def test_what_a_killed_supervisor_left_is_found_by_its_mark(section: Any, tmp_path: Path) -> None:
    async def use(stack: GymStack) -> None:
        os.kill(stack._process.pid, signal.SIGKILL)
        wait_until("Gym has died with its supervisor", lambda: not is_alive(pids(tmp_path)[0]))
        assert is_alive(pids(tmp_path)[1])

    with_stack(section("serves"), tmp_path, use)
    assert not any(map(is_alive, pids(tmp_path)))


def test_a_python_without_an_environment_is_refused(section: Any, tmp_path: Path) -> None:
    (tmp_path / "environment" / "bin" / "activate").unlink()
    with pytest.raises(ConfigError, match="of a virtual environment"):
        asyncio.run(start(section("serves"), tmp_path))
