"""Processes that call a function: crashes, deadlines, the sandbox, and replies that are not believed."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.environments import process_pool
from nemo_rl.environments.process_pool import PoolOptions, ProcessPool, find_response_fault
from nemo_rl.errors import WorkerDied, WorkerError, WorkerTimeout
from tests.unit.environments import custom, pool_functions


def call_all(function: Any, calls: list[Any], *, timeout_s: float = 60.0, **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        path = f"{function.__module__}:{function.__name__}"
        pool = ProcessPool(path, 1, PoolOptions(timeout_s, **options))
        try:
            return list(await asyncio.gather(*map(pool.call, calls), return_exceptions=True))
        finally:
            await pool.close()

    return asyncio.run(main())


def test_worker_that_hangs_dies_or_raises_fails_its_call_alone() -> None:
    results = call_all(custom.hang_or_die, ["a", "hang", "b", "die", "c", "raise", "d"], timeout_s=5.0)
    assert results[0::2] == ["a", "b", "c", "d"]
    assert all(isinstance(error, WorkerError) for error in results[1::2])
    assert isinstance(results[1], WorkerTimeout)
    assert "did not finish in 5 s" in str(results[1])
    assert "its process died" in str(results[3])
    assert "KeyError: 'lost'" in str(results[5])


def test_time_is_computing_time_and_a_crash_is_told_from_a_kill() -> None:
    calls = ["compute", "sleep 1.5", "exit 0", "crash", "kill"]
    computed, slept, ended, crashed, killed = call_all(pool_functions.misbehave, calls, cpu_s=1.0)
    assert slept == "slept"
    faults = []
    for error in (computed, ended, crashed, killed):
        assert isinstance(error, WorkerDied)
        faults.append(find_response_fault(error))
    assert faults == ["verifier_timeout", "verifier_crash", "verifier_crash", None]


def test_calls_of_one_request_fail_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    request = process_pool._Worker._request

    def recorded(worker: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        return request(worker, batch)

    monkeypatch.setattr(process_pool._Worker, "_request", recorded)
    calls = [*(str(number) for number in range(20)), "die", "raise", *(str(number) for number in range(22, 40))]
    results = call_all(custom.hang_or_die, calls, max_batch_size=8)
    assert results[:20] + results[22:] == calls[:20] + calls[22:]
    assert isinstance(results[20], WorkerDied)
    assert "KeyError" in str(results[21])
    assert max(sizes) == 8
    assert sum(sizes) > len(calls)  # those of the request that a process did not survive are called again


@pytest.mark.parametrize("kind", ["forged", "early", "endless", "deep", "list", "nothing"])
def test_reply_that_is_none_replaces_the_process(kind: str) -> None:
    forged, after = call_all(pool_functions.write_replies, [kind, "fine"], timeout_s=3.0)
    assert isinstance(forged, WorkerError) or forged == "own"
    assert after == "own"


def test_arguments_that_cannot_be_pickled_and_a_system_without_processes_fail_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def main() -> list[Any]:
        pool = ProcessPool(f"{custom.__name__}:hang_or_die", 1, PoolOptions(60.0))
        first = await asyncio.gather(pool.call(lambda: 0), return_exceptions=True)
        monkeypatch.setattr(process_pool.subprocess, "Popen", refuse)
        died = await asyncio.gather(pool.call("die"), return_exceptions=True)
        await pool.close()
        return [*first, *died, *await asyncio.gather(pool.call("a"), return_exceptions=True)]

    unpicklable, refused, closed = asyncio.run(asyncio.wait_for(main(), 60))
    assert "pickle" in str(unpicklable).lower()
    assert isinstance(refused, OSError)
    assert isinstance(closed, WorkerError)


def test_result_that_is_no_json_is_an_error() -> None:
    (result,) = call_all(pool_functions.misbehave, ["object"])
    assert isinstance(result, WorkerError)
    assert "the result cannot be written as JSON" in str(result)


def test_sandboxed_function_can_compute_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    calls = ["variables", f"read {secret}", f"write {tmp_path / 'new'}", "connect", "fork", "thread", "run", "json"]
    variables, *refused, imported = call_all(pool_functions.reach_out, calls, sandboxed=True)
    assert not {"HF_TOKEN", "PATH", "PWD"} & set(variables)
    assert all(isinstance(error, WorkerError) for error in refused), refused
    assert imported == [1]  # modules of the installation can be imported still
    assert os.listdir(tmp_path) == ["secret"]


def test_factory_makes_the_function_before_the_sandbox_closes(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("7")

    async def main() -> Any:
        path = f"{pool_functions.__name__}:{pool_functions.make_lookup.__name__}"
        pool = ProcessPool(path, 1, PoolOptions(60.0, sandboxed=True), factory_args=(str(table),))
        try:
            return await pool.call(3)
        finally:
            await pool.close()

    assert asyncio.run(main()) == 10


def test_function_that_cannot_be_imported_says_so() -> None:
    async def main() -> None:
        pool = ProcessPool("tests.unit.environments.pool_functions:absent", 1, PoolOptions(60.0, sandboxed=True))
        try:
            await pool.call(1)
        finally:
            await pool.close()

    with pytest.raises(WorkerError, match=r"AttributeError: .*absent"):
        asyncio.run(main())
