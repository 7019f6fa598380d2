"""Workers that fail as one: results by rank, the cause of a failure, deaths while nobody calls, logs."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.distributed.cluster import connect, reserve
from nemo_rl.distributed.worker_group import WorkerGroup
from nemo_rl.errors import WorkerDied, WorkerError

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def local_ray() -> None:
    connect(num_cpus=2)


class Member:
    """Nothing in it knows of Ray or of torch."""

    def __init__(self, scale: int, *, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        if scale < 0 and rank == 1:
            raise ValueError("scale is negative")
        self.scale, self.rank, self.world_size = scale, rank, world_size
        self.master = (master_address, master_port)

    def place(self, values: list[int]) -> tuple[int, int, int, tuple[str, int]]:
        logging.getLogger("nemo_rl.member").info("asked for its place")
        print("written by rank", self.rank)  # noqa: T201
        return self.rank, self.world_size, self.scale * sum(values), self.master

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    def fail_or_hang(self, failing: int) -> None:
        if self.rank == failing:
            raise KeyError("lost")
        time.sleep(600)

    def die_or_fail(self, dying: int) -> None:
        """As a collective does: the loss of one rank is an error of the others, at the same time or before."""
        if self.rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")


def layout(num_ranks: int) -> Layout:
    places = (DeviceSlot(0),) * num_ranks
    return Layout("cpu", 1, 0, places, (DeviceSlot(0),), is_split=False, needs_cluster=True)


def using(use: Callable[[WorkerGroup], Awaitable[Any]], *, scale: int = 1, log_dir: Path | None = None) -> Any:
    async def main() -> Any:
        reservation = await reserve(layout(2), timeout_s=DEADLINE_S)
        slots = [reservation.slot(place) for place in layout(2).ranks]
        group = None
        try:
            group = await WorkerGroup.create(
                Member, scale, slots=slots, role="policy", timeout_s=DEADLINE_S, log_dir=log_dir
            )
            return await use(group)
        finally:
            if group is not None:
                group.kill()
            reservation.release()

    return asyncio.run(main())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def all_gone(pids: list[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not all(map(is_gone, pids)):  # noqa: ASYNC110 - processes of Ray's, that nobody here waits for
            await asyncio.sleep(0.05)


def test_results_come_by_rank_and_what_workers_log_arrives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(group: WorkerGroup) -> tuple[Any, ...]:
        async def logged() -> None:
            while "asked for its place" not in caplog.text:  # noqa: ASYNC110 - it comes from another process
                await asyncio.sleep(0.05)

        places = await group.call_all("place", [1, 2], timeout_s=DEADLINE_S)
        one = await group.call_rank0("place", values=[5])
        threads = await group.call_all("threads")
        await asyncio.wait_for(logged(), DEADLINE_S)
        return places, one, threads

    with caplog.at_level(logging.INFO, logger="nemo_rl.member"):
        places, one, threads = using(use, scale=10, log_dir=tmp_path)
    assert [place[:3] for place in places] == [(0, 2, 30), (1, 2, 30)]
    assert places[0][3] == places[1][3]
    assert one[:3] == (0, 2, 50)
    assert set(threads) == {"1"}  # two cores, two ranks
    assert "[policy rank 0] asked for its place" in caplog.text
    assert "rank 1]" not in caplog.text  # its warnings alone
    assert "written by rank 1" in (tmp_path / "policy_1.log").read_text()
    assert "asked for its place" in (tmp_path / "policy_1.log").read_text()


def test_what_one_rank_raises_ends_the_others_that_wait_for_it() -> None:
    async def use(group: WorkerGroup) -> None:
        pids = await group.pids()
        with pytest.raises(
            WorkerError, match=r"(?s)policy rank 1\.fail_or_hang raised KeyError: 'lost'.*in fail_or_hang"
        ):
            await group.call_all("fail_or_hang", 1)
        await all_gone(pids)
        with pytest.raises(WorkerError, match="gone: policy rank 1"):
            await group.call_all("threads")

    using(use)


def test_the_death_of_a_rank_is_the_cause_not_its_echo_in_another(tmp_path: Path) -> None:
    async def use(group: WorkerGroup) -> None:
        await group.call_all("place", [1])
        with pytest.raises(WorkerDied, match=r"(?s)policy rank 1 has died: .*policy_1\.log:.*written by rank 1"):
            await group.call_all("die_or_fail", 1)

    using(use, log_dir=tmp_path)


def test_a_death_while_nobody_calls_ends_the_task() -> None:
    async def use(group: WorkerGroup) -> None:
        pids = await group.pids()

        async def waits() -> None:
            async with group.cancel_task_on_worker_death():
                os.kill(pids[1], signal.SIGKILL)
                await asyncio.wait_for(asyncio.Event().wait(), DEADLINE_S)

        with pytest.raises(WorkerDied, match="policy rank 1"):
            await waits()
        await all_gone(pids)

    using(use)


def test_a_cancellation_that_is_not_the_groups_stays_one() -> None:
    async def use(group: WorkerGroup) -> None:
        async def main() -> None:
            async with group.cancel_task_on_worker_death():
                await asyncio.Event().wait()

        task = asyncio.create_task(main())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    using(use)


def test_a_constructor_that_raises_in_one_rank_is_the_error() -> None:
    async def unreachable(group: WorkerGroup) -> None:
        raise AssertionError("created")

    with pytest.raises(WorkerError, match=r"policy rank 1\.make raised ValueError: scale is negative"):
        using(unreachable, scale=-1)
