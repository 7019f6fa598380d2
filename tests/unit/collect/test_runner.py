"""The runner over an engine without a model: whatever stops it, every rollout is stored once, and none is run twice."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from nemo_rl.collect.merge import merge
from nemo_rl.collect.runner import CollectionLimits, collect_rollouts
from nemo_rl.collect.shards import Chunk, KeySpace
from nemo_rl.collect.store import RolloutStore
from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_dependencies import RolloutDependencies
from nemo_rl.types import GenerationRequest, Trajectory
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import LIMITS, SAMPLING, VOCAB_SIZE, dependencies, prompt

IDENTITY = {"data": "d"}


class Killed(Exception):
    """Ends a collection at a point that a test chooses."""


def opened(directory: Path, *, seed: int = 0, tasks: int, repeats: int, chunk: Chunk | None = None) -> RolloutStore:
    keys = KeySpace(tasks, repeats, chunk)
    return RolloutStore.open(directory, seed=seed, keys=keys, identity=IDENTITY, max_attempts=2)


def rollouts(engine: FakeGeneration) -> RolloutDependencies:
    return dependencies(engine, {"game": FakeEnvironment()}, limits=replace(LIMITS, max_retries=0))


def collect(
    engine: FakeGeneration,
    stores: list[RolloutStore],
    *,
    concurrency: int = 4,
    on_rollout: Callable[[Trajectory], None] = lambda trajectory: None,
    max_failures_in_a_row: int = 1000,
) -> None:
    tasks = stores[0].keys.num_tasks
    limits = CollectionLimits(concurrency, max_failures_in_a_row, write_token_ids=True)

    async def run() -> None:
        prompts = [prompt(number) for number in range(tasks)]
        await collect_rollouts(stores, prompts, rollouts(engine), SAMPLING, limits=limits, on_rollout=on_rollout)

    asyncio.run(run())


def rows(path: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "timings"} for row in found]


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (row["seed"], row["task_index"], row["rollout_index"]))


@hypothesis.given(
    tasks=st.integers(1, 6),
    repeats=st.integers(1, 4),
    concurrency=st.integers(1, 9),
    is_async=st.booleans(),
    failing_share=st.sampled_from([0.0, 0.3]),
    kills=st.lists(st.integers(1, 12), max_size=3),
)
@hypothesis.settings(max_examples=25)
def test_whatever_kills_it_each_rollout_is_stored_once_and_what_is_stored_is_not_run_again(
    tasks: int, repeats: int, concurrency: int, is_async: bool, failing_share: float, kills: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        whole, parts = Path(directory) / "whole", Path(directory) / "parts"
        with opened(whole, tasks=tasks, repeats=repeats) as store:
            collect(FakeGeneration(vocab_size=VOCAB_SIZE, failing_share=failing_share), [store])
        for kill_after in [*kills, None]:
            engine = FakeGeneration(vocab_size=VOCAB_SIZE, is_async=is_async, failing_share=failing_share)
            with opened(parts, tasks=tasks, repeats=repeats) as store:
                finished = {key for key in store.keys if store.is_finished(key)}
                left = [kill_after]

                def on_rollout(_: Trajectory, left: list[int | None] = left) -> None:
                    if left[0] is not None:
                        left[0] -= 1
                        if left[0] == 0:
                            raise Killed

                try:
                    collect(engine, [store], concurrency=concurrency, on_rollout=on_rollout)
                except Killed:
                    assert kill_after is not None
            asked = {tuple(int(part) for part in r.session_id.split(":")[1:]) for r in engine.requests}
            assert not asked & {(key.task_index, key.rollout_index) for key in finished}
        assert in_order(rows(parts / "rollouts-rs0.jsonl")) == in_order(rows(whole / "rollouts-rs0.jsonl"))
        assert (parts / "rollouts-rs0.jsonl.done").exists()
        attempts = {(row["task_index"], row["rollout_index"], row["attempt"]) for row in rows_of_failures(parts)}
        given_up = {(task, rollout) for task, rollout, attempt in attempts if attempt == 2}
        assert len(rows(parts / "rollouts-rs0.jsonl")) + len(given_up) == tasks * repeats
        assert max((attempt for *_, attempt in attempts), default=0) <= 2


def rows_of_failures(directory: Path) -> list[dict[str, Any]]:
    return rows(directory / "rollouts-rs0_failures.jsonl")


def test_chunks_of_seeds_merged_are_the_unchunked_collection(tmp_path: Path) -> None:
    for name, chunks in (("whole", [None]), ("chunks", [Chunk(index, 4) for index in range(4)])):
        for chunk in chunks:
            stores = [opened(tmp_path / name, seed=seed, tasks=10, repeats=3, chunk=chunk) for seed in (0, 5)]
            collect(FakeGeneration(vocab_size=VOCAB_SIZE), stores)
            for store in stores:
                store.close()
        merge(tmp_path / name)
    whole = rows(tmp_path / "whole" / "rollouts.jsonl")
    assert rows(tmp_path / "chunks" / "rollouts.jsonl") == whole
    assert len(whole) == 2 * 10 * 3


def test_seeds_seed_the_sampling_and_nothing_else_does(tmp_path: Path) -> None:
    def messages(name: str, seed: int) -> list[Any]:
        with opened(tmp_path / name, seed=seed, tasks=4, repeats=2) as store:
            collect(FakeGeneration(vocab_size=VOCAB_SIZE), [store], concurrency=3)
        return [row["messages"] for row in in_order(rows(tmp_path / name / f"rollouts-rs{seed}.jsonl"))]

    first = messages("first", 1)
    assert messages("again", 1) == first
    assert messages("other", 2) != first
    assert len({json.dumps(m[1:]) for m in first}) > 2, "repeats differ"


def test_at_most_the_allowed_number_runs_at_once(tmp_path: Path) -> None:
    running, most = 0, 0

    async def latency(request: GenerationRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(request.seed % 5 + 1):
            await asyncio.sleep(0)
        running -= 1

    with opened(tmp_path, tasks=9, repeats=4) as store:
        collect(FakeGeneration(vocab_size=VOCAB_SIZE, latency=latency), [store], concurrency=6)
        assert store.num_finished == 36
    assert 2 <= most <= 6


def test_an_engine_of_batches_is_given_batches(tmp_path: Path) -> None:
    engine = FakeGeneration(vocab_size=1, is_async=False)  # its only token ends a turn
    sizes: list[int] = []
    generate = engine.generate

    def counted(requests: Any) -> Any:
        sizes.append(len(requests))
        return generate(requests)

    engine.generate = counted  # pyright: ignore[reportAttributeAccessIssue]
    with opened(tmp_path, tasks=7, repeats=3) as store:
        collect(engine, [store], concurrency=8)
    assert sizes[0] == 8


def test_what_fails_is_tried_again_and_then_given_up_with_each_cause(tmp_path: Path) -> None:
    with opened(tmp_path, tasks=3, repeats=2) as store:
        collect(FakeGeneration(failing_share=1.0), [store])
        assert (store.num_finished, store.num_given_up, store.num_missing) == (0, 6, 0)
        assert store.is_done
    failures = rows_of_failures(tmp_path)
    assert [row["attempt"] for row in failures] == [1] * 6 + [2] * 6
    assert {row["class"] for row in failures} == {"infra"}
    assert all("made to fail" in row["cause"] for row in failures)


def test_a_rollout_that_succeeds_at_its_second_attempt_is_stored(tmp_path: Path) -> None:
    with opened(tmp_path, tasks=3, repeats=1) as store:
        collect(FakeGeneration(vocab_size=1, fails_first=1), [store])
        assert (store.num_finished, store.num_given_up) == (3, 0)
    assert len(rows_of_failures(tmp_path)) == 3


def test_failures_in_a_row_stop_the_collection_before_all_attempts_are_spent(tmp_path: Path) -> None:
    with opened(tmp_path, tasks=50, repeats=1) as store:
        with pytest.raises(RolloutError, match=r"5 rollouts in a row failed .* infra: .*made to fail"):
            collect(FakeGeneration(failing_share=1.0), [store], concurrency=2, max_failures_in_a_row=5)
        assert store.num_missing == 50
    assert len(rows_of_failures(tmp_path)) <= 6


def test_prompts_are_read_as_their_turn_comes(tmp_path: Path) -> None:
    class Prompts(list[Any]):
        most_ahead = 0

        def __getitem__(self, index: Any) -> Any:
            self.most_ahead = max(self.most_ahead, index - store.num_finished)
            return super().__getitem__(index)

    prompts = Prompts(prompt(number) for number in range(40))
    with opened(tmp_path, tasks=40, repeats=1) as store:
        engine = FakeGeneration(vocab_size=1)
        asyncio.run(
            collect_rollouts([store], prompts, rollouts(engine), SAMPLING, limits=CollectionLimits(concurrency=3))
        )
    assert prompts.most_ahead <= 3


def test_a_cancelled_collection_keeps_what_has_ended(tmp_path: Path) -> None:
    async def latency(request: GenerationRequest) -> None:
        if not request.session_id.startswith(("rs0:0:", "rs0:1:")):
            await asyncio.Event().wait()

    async def run(store: RolloutStore) -> None:
        two = asyncio.Event()
        prompts = [prompt(number) for number in range(6)]
        work = asyncio.ensure_future(
            collect_rollouts(
                [store],
                prompts,
                rollouts(FakeGeneration(vocab_size=1, latency=latency)),
                SAMPLING,
                limits=CollectionLimits(concurrency=4),
                on_rollout=lambda _: two.set() if store.num_finished == 2 else None,
            )
        )
        await two.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    with opened(tmp_path, tasks=6, repeats=1) as store:
        asyncio.run(run(store))
    assert {row["task_index"] for row in rows(tmp_path / "rollouts-rs0.jsonl")} == {0, 1}
    with opened(tmp_path, tasks=6, repeats=1) as store:
        assert [key.task_index for key in store.missing()] == [2, 3, 4, 5]
