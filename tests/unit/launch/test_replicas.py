"""`nemo-rl replicas` against a router of fakes in a run directory."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from nemo_rl import cli
from nemo_rl.errors import GenerationError
from nemo_rl.generation.router import ReplicaState, ReplicatedGeneration, Restart
from nemo_rl.launch import replicas
from nemo_rl.launch.replicas import follow_requests
from tests.fakes.generation import FakeGeneration


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PERIOD_S", 0.01)


def ask(run_dir: Path, *words: str) -> Callable[[], int]:
    return lambda: cli.run(["replicas", str(run_dir), *words])


async def start_fake(index: int) -> FakeGeneration:
    return FakeGeneration()


async def with_run(run_dir: Path, *questions: Callable[[], int], start: Restart = start_fake) -> tuple[list[int], int]:
    """The exit codes of commands beside a run of two engines, which refits all the time; how many it has then."""

    async def refit() -> None:
        while True:
            await router.pause()
            await router.update_weights(None, 1)  # type: ignore[arg-type]
            await router.resume()
            await asyncio.sleep(0.01)

    router = ReplicatedGeneration([FakeGeneration(), FakeGeneration()], restart=start, max_replicas=4, retry_s=())
    async with follow_requests(router, run_dir):
        training = asyncio.create_task(refit())
        while not (run_dir / replicas.STATE_FILE).exists():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        codes = [await asyncio.to_thread(question) for question in questions]
        training.cancel()
        return codes, len(router.replicas)


def test_replicas_are_shown_added_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [ask(tmp_path), ask(tmp_path, "4", "--wait"), ask(tmp_path, "1", "--wait", "60")]
    codes, left = asyncio.run(with_run(tmp_path, *questions))
    assert codes == [0, 0, 0]
    assert left == 1
    said = capsys.readouterr().out
    assert "wanted: 2\nserving: 2 (engine 0, engine 1)\nstarting: 0\nwaiting: 0\nleaving: 0\n" in said
    assert "wanted: 4\nserving: 4 (engine 0, engine 1, engine 2, engine 3)\n" in said
    assert said.endswith("wanted: 1\nserving: 1 (engine 0)\nstarting: 0\nwaiting: 0\nleaving: 0\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("count", "said"), [("5", "must be from 1 to 4"), ("0", "must be 1 or more")])
def test_a_number_that_cannot_be_had_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: str, said: str
) -> None:
    codes, left = asyncio.run(with_run(tmp_path, ask(tmp_path, count)))
    assert (codes, left) == ([2], 2)
    assert said in capsys.readouterr().err


def test_a_replica_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def start(index: int) -> FakeGeneration:
        raise GenerationError("no memory")

    codes, left = asyncio.run(with_run(tmp_path, ask(tmp_path, "3", "--wait"), ask(tmp_path, "2"), start=start))
    assert (codes, left) == ([2, 0], 2)
    told = capsys.readouterr()
    assert (
        "wanted: 3\nserving: 2 (engine 0, engine 1)\nstarting: 0\nwaiting: 0\nleaving: 0\nfailed: 1 (engine 2)"
        in told.out
    )
    assert "engine 2 did not start: GenerationError: no memory" in told.err
    assert "failed" not in told.out.split("wanted: 2")[1]  # it is no longer wanted


def test_a_request_that_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / replicas.REQUEST_FILE).write_text("many")

    def problem() -> int:
        assert "many" in json.loads((tmp_path / replicas.STATE_FILE).read_text())["refusal"]
        return 0

    assert asyncio.run(with_run(tmp_path, problem)) == ([0], 2)


def test_a_run_that_is_not_there_or_has_one_engine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with follow_requests(FakeGeneration(), tmp_path):
            assert await asyncio.to_thread(ask(tmp_path, "2")) == 2

    asyncio.run(main())
    assert "in_actor: true" in capsys.readouterr().err
    assert ask(tmp_path / "nowhere")() == 2
    assert "no such run directory" in capsys.readouterr().err


def test_a_killed_run_is_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SILENT_S", 0.05)
    state = ReplicaState(1, ("engine 0",), (), (), ())
    (tmp_path / replicas.STATE_FILE).write_text(json.dumps(asdict(replicas.ReportedState(state, "", 3))))
    assert ask(tmp_path)() == 2
    assert "has it been killed?" in capsys.readouterr().err


def test_a_damaged_state_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / replicas.STATE_FILE).write_text('{"beats": 3')
    assert ask(tmp_path)() == 2
    assert "is no state of replicas: Invalid JSON" in capsys.readouterr().err


def test_a_state_of_another_shape_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = asdict(replicas.ReportedState(ReplicaState(1, (), (), (), ()), "", 3)) | {"beats": "many"}
    (tmp_path / replicas.STATE_FILE).write_text(json.dumps(state))
    assert ask(tmp_path)() == 2
    assert "is no state of replicas: beats: Input should be a valid integer" in capsys.readouterr().err
