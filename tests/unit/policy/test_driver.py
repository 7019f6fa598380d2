import asyncio
import threading
from typing import Any

import pytest
import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import WorkerTimeout
from nemo_rl.policy import driver
from nemo_rl.policy.driver import LocalPolicy, PolicyThread, PolicyWorkerGroup


def test_all_calls_run_on_one_thread_with_the_creators_number_of_torch_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    thread = PolicyThread()
    torch.set_num_threads(before)

    async def main() -> list[tuple[int, int]]:
        return [await thread.run(lambda: (threading.get_ident(), torch.get_num_threads())) for _ in range(2)]

    first, second = asyncio.run(main())
    assert first == second
    assert first[0] != threading.get_ident()
    assert first[1] == 1
    thread.close()


def test_grad_mode_of_the_caller_is_left_alone() -> None:
    thread = PolicyThread()
    thread.run_blocking(torch.set_grad_enabled, False)
    assert torch.is_grad_enabled()
    thread.close()


def test_close_joins_and_refuses_further_calls() -> None:
    thread = PolicyThread("joined")
    thread.run_blocking(int)
    thread.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("joined")]
    with pytest.raises(RuntimeError):
        thread.run_blocking(int)


class StuckWorker:
    """A worker whose optimizer step waits for `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def train_step(self, batch: object, loss_fn: object) -> dict[str, float]:
        self.release.wait(60)
        return {}


def test_a_call_past_its_deadline_names_itself_and_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = StuckWorker()
    monkeypatch.setattr(driver, "make_policy_worker", lambda *arguments, **named: worker)
    policy = LocalPolicy(PolicyConfig(model_name="m", call_timeout_s=0.1))

    async def main() -> None:
        with pytest.raises(WorkerTimeout, match=r"^policy rank 0\.train_step .* 0\.1 s \(policy\.call_timeout_s\)$"):
            await policy.train_step(None, None)  # pyright: ignore[reportArgumentType]
        await policy.close()
        assert not worker.release.is_set()

    asyncio.run(main())
    worker.release.set()


class LateWorkers:
    """A group whose second rank answers no call in time."""

    async def call_all(self, name: str, *args: Any, timeout_s: float) -> list[Any]:
        raise WorkerTimeout(f"policy rank 1.{name} did not answer in {timeout_s} s")


def test_a_late_rank_and_the_key_of_its_deadline_are_named() -> None:
    group = PolicyWorkerGroup(LateWorkers(), key="policy", call_timeout_s=7.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkerTimeout, match=r"^policy rank 1\.finish_save .* 7\.0 s \(policy\.call_timeout_s\)$"):
        asyncio.run(group.finish_save())
