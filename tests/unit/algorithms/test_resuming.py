import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.resuming import CheckpointWriter, Position, restore
from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.checkpoint import Checkpoint
from nemo_rl.errors import CheckpointError, DataError
from tests.fakes.policy import FakePolicy
from tests.unit.algorithms.run_setup import make_config, make_rig


async def save(run: TrainingRun, position: Position, metrics: dict[str, float]) -> Checkpoint | None:
    """To the end; the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        await checkpoint_writer.begin(position, metrics)
    return run.checkpoints.latest() if run.checkpoints is not None else None


def test_without_a_checkpoint_a_run_starts_at_step_0(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    position = asyncio.run(restore(rig.run))
    assert position == Position(0, rig.source.state_dict())
    assert rig.calls == []


def test_restore_brings_back_policy_source_and_random_states(tmp_path: Path) -> None:
    async def main() -> None:
        saved = make_rig(tmp_path)
        saved.policy.num_steps = 3
        await saved.source.next_groups(0)
        await save(saved.run, Position(3, saved.source.state_dict()), {"train:reward": 0.5})
        expected = (random.random(), float(torch.rand(())))
        random.seed(1)
        torch.manual_seed(1)

        restored = make_rig(tmp_path)
        position = await restore(restored.run)
        assert position == Position(3, saved.source.state_dict())
        assert restored.policy.num_steps == 3
        assert restored.source.state_dict() == saved.source.state_dict()
        assert (random.random(), float(torch.rand(()))) == expected

    asyncio.run(main())


def test_restore_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        rig = make_rig(tmp_path)
        for step in (1, 12, 3):
            rig.policy.num_steps = step
            await save(rig.run, Position(step, rig.source.state_dict()), {})
        assert (await restore(rig.run)).step == rig.policy.num_steps == 12

    asyncio.run(main())


def test_a_checkpoint_tells_its_step_its_prompts_its_metrics_and_its_configuration(tmp_path: Path) -> None:
    async def main() -> None:
        rig = make_rig(tmp_path, num_prompts=3)
        for _ in range(2):
            await rig.source.next_groups(0)
        checkpoint = await save(rig.run, Position(2, rig.source.state_dict()), {"train:reward": 0.5})
        assert checkpoint is not None
        info = checkpoint.info
        assert (info.step, info.consumed_prompts, info.epoch, info.metrics) == (2, 3, 1, {"train:reward": 0.5})
        assert (checkpoint.path / "config.yaml").read_text().startswith("grpo:")

    asyncio.run(main())


def test_a_step_is_saved_once_and_step_0_never(tmp_path: Path) -> None:
    async def main() -> None:
        rig = make_rig(tmp_path)
        source_state = rig.source.state_dict()
        assert await save(rig.run, Position(0, source_state), {}) is None
        first = await save(rig.run, Position(1, source_state), {"train:reward": 1.0})
        again = await save(rig.run, Position(1, source_state), {})
        assert first == again
        assert rig.calls == ["save", "finish_save"]

    asyncio.run(main())


def test_without_checkpointing_nothing_is_saved_or_loaded(tmp_path: Path) -> None:

    async def main() -> None:
        rig = make_rig(tmp_path)
        run = replace(rig.run, checkpoints=None)
        assert await save(run, Position(1, run.source.state_dict()), {}) is None
        assert (await restore(run)).step == 0
        assert rig.calls == []

    asyncio.run(main())


def test_a_checkpoint_of_other_prompts_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        rig = make_rig(tmp_path, num_prompts=4)
        await save(rig.run, Position(1, rig.source.state_dict()), {})
        with pytest.raises(DataError, match="other training prompts"):
            await restore(make_rig(tmp_path, num_prompts=5).run)

    asyncio.run(main())


def test_the_optimizer_is_saved_where_the_configuration_says_so(tmp_path: Path) -> None:

    asked: list[bool] = []

    class Remembering(FakePolicy):
        async def save(self, path: Path, *, save_optimizer: bool) -> None:
            asked.append(save_optimizer)
            await super().save(path, save_optimizer=save_optimizer)

    async def main() -> None:

        rig = make_rig(tmp_path, make_config(checkpointing={"save_optimizer": False}))
        await save(replace(rig.run, policy=Remembering()), Position(1, rig.source.state_dict()), {})

    asyncio.run(main())
    assert asked == [False]


def test_a_checkpoint_has_its_name_only_when_it_is_finished(tmp_path: Path) -> None:
    async def main() -> None:
        rig = make_rig(tmp_path)
        checkpoint_writer = CheckpointWriter(rig.run)
        await checkpoint_writer.begin(Position(1, rig.source.state_dict()), {})
        assert checkpoint_writer.has_pending
        assert rig.checkpoints() == {}
        await checkpoint_writer.begin(Position(2, rig.source.state_dict()), {})
        assert list(rig.checkpoints()) == [1]  # before the next one is begun
        await checkpoint_writer.finish()
        assert list(rig.checkpoints()) == [1, 2]
        assert rig.calls == ["save", "finish_save"] * 2

    asyncio.run(main())


async def save_and_fail(run: TrainingRun, error: Exception | None) -> None:
    async with CheckpointWriter(run) as checkpoint_writer:
        await checkpoint_writer.begin(Position(1, run.source.state_dict()), {})
        if error is not None:
            raise error


def test_an_error_does_not_lose_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(save_and_fail(rig.run, ZeroDivisionError()))
    assert list(rig.checkpoints()) == [1]


class FullDisk(FakePolicy):
    async def finish_save(self) -> None:
        raise CheckpointError("no space")


def test_a_checkpoint_that_cannot_be_written_hides_no_other_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = replace(make_rig(tmp_path).run, policy=FullDisk())
    with pytest.raises(CheckpointError, match="no space"):
        asyncio.run(save_and_fail(run, None))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(save_and_fail(run, ZeroDivisionError()))
    assert "lost the pending checkpoint: no space" in caplog.text
