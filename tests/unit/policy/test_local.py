import asyncio
import threading

import pytest
import torch

from nemo_rl.policy.local import PolicyThread


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
