"""vLLM on a thread of this process answers as it does in a process of its own, and ends without a trace."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl.errors import GenerationError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.cpu.settings import WORKER_EXTENSION
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.types import Completion
from nemo_rl.weight_manifests import WeightManifest
from tests.contracts.engines import MAX_MODEL_LEN, answers, request, section, tiny_model
from tests.contracts.test_weight_sync import published
from tests.templates import byte_tokenizer

pytestmark = pytest.mark.timeout(600)
KINDS = ["vllm", "vllm in process"]


@pytest.fixture(scope="module")
def spelling_model(tmp_path_factory: pytest.TempPathFactory) -> EngineModel:
    """Return a model with a tokenizer, which stop strings need."""
    directory: Path = tmp_path_factory.mktemp("spelling")
    tiny_model(tied=True).save_pretrained(directory)
    byte_tokenizer("chatml").save_pretrained(directory)
    return EngineModel(str(directory), "float32", MAX_MODEL_LEN, "cpu")


async def start(model: EngineModel) -> VllmGeneration:
    return await VllmGeneration.create(section(in_process=True), model)


def test_samples_are_those_of_the_engine_in_its_own_process(engine_loop: asyncio.Runner, engines: Any) -> None:
    requests = [request(str(i), tokens=range(5, 15 + i), seed=i, max_new_tokens=20) for i in range(12)]
    results = []
    for kind in KINDS:
        engine = engines(kind, "tied")
        published(engine_loop, engine, tiny_model(tied=True), weight_version=0)
        results.append(engine_loop.run(answers(engine, requests)))
    own, here = results
    for name, completion in here.items():
        assert completion.token_ids == own[name].token_ids
        assert completion.logprobs == pytest.approx(own[name].logprobs, abs=1e-5)
        assert completion.weight_versions == own[name].weight_versions


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_told_in_order_while_they_are_sampled(engine_loop: asyncio.Runner, engines: Any, kind: str) -> None:
    engine = engines(kind, "tied")
    told: list[int] = []
    counts: list[int] = []

    def on_tokens(start: int, new: Any) -> None:
        assert start == len(told)
        told.extend(new)
        counts.append(len(new))

    asked = replace(request("a", max_new_tokens=30), on_tokens=on_tokens)
    completion = engine_loop.run(answers(engine, [asked]))["a"]
    assert tuple(told) == completion.token_ids
    assert len(counts) > 1


def test_stop_string_ends_a_response(engine_loop: asyncio.Runner, spelling_model: EngineModel) -> None:
    tokenizer: Any = byte_tokenizer("chatml")

    async def main() -> tuple[Completion, Completion, str]:
        engine = await start(spelling_model)
        try:
            free = (await answers(engine, [request("a", max_new_tokens=40)]))["a"]
            stop = next(
                text for text in map(tokenizer.decode, free.token_ids[5:]) if text.isascii() and text.isprintable()
            )
            stopped = (await answers(engine, [request("a", max_new_tokens=40, stop_strings=(stop,))]))["a"]
            assert engine._engine.get_num_unfinished_requests() == 0
            return free, stopped, stop
        finally:
            await engine.close()

    free, stopped, stop = engine_loop.run(main())
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stop in tokenizer.decode(list(stopped.token_ids))
    assert stop not in tokenizer.decode(list(stopped.token_ids[:-1]))
    assert len(stopped.logprobs) == len(stopped.token_ids)


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_process_that_the_trainer_starts_inherits_the_variables_of_the_engine(
    engine_loop: asyncio.Runner, spelling_model: EngineModel, in_process: bool
) -> None:
    """vLLM's CPU platform sets LD_PRELOAD, for workers of its own."""
    before = dict(os.environ)
    preloads: set[str | None] = set()

    async def watch() -> None:
        while True:
            preloads.add(os.environ.get("LD_PRELOAD"))
            await asyncio.sleep(0.01)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        engine = await VllmGeneration.create(section(in_process=in_process), spelling_model)
        watching.cancel()
        try:
            assert dict(os.environ) == before
        finally:
            await engine.close()

    engine_loop.run(main())
    assert preloads == {before.get("LD_PRELOAD")} or not in_process


def test_step_that_fails_ends_the_requests_and_the_engine(
    engine_loop: asyncio.Runner, spelling_model: EngineModel
) -> None:
    async def main() -> None:
        engine = await start(spelling_model)
        core: Any = engine._engine._thread._core  # type: ignore[union-attr]

        def fail() -> None:
            raise RuntimeError("no memory")

        core.step_fn = fail
        try:
            with pytest.raises(GenerationError, match="has died") as caught:
                await answers(engine, [request(str(i)) for i in range(3)])
            assert "no memory" in repr(caught.value.__cause__.__cause__)  # type: ignore[union-attr]
            with pytest.raises(GenerationError, match="has died"):
                await answers(engine, [request("later")])
            with pytest.raises(GenerationError, match="has died"):
                await engine.update_weights(WeightManifest("/dev/null", ()), 1)
        finally:
            await engine.close()

    engine_loop.run(main())


def test_closing_fails_what_runs_and_leaves_the_process_as_it_was(
    engine_loop: asyncio.Runner, spelling_model: EngineModel
) -> None:
    def threads() -> int:
        return sum(thread.name == "vllm" for thread in threading.enumerate())

    async def main() -> None:
        before, set_num_threads, own_group = threads(), torch.set_num_threads, dist.is_initialized()
        engine = await start(spelling_model)
        assert torch.set_num_threads is set_num_threads
        running = asyncio.create_task(answers(engine, [request("a", max_new_tokens=500)]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(GenerationError):
            await running
        assert threads() == before
        assert dist.is_initialized() or not own_group
        again = await start(spelling_model)  # in the same process group
        try:
            assert isinstance((await answers(again, [request("b")]))["b"], Completion)
        finally:
            await again.close()

    engine_loop.run(main())


@pytest.mark.slow  # starts two engines
def test_engines_with_different_extensions_of_the_worker_share_a_process(
    engine_loop: asyncio.Runner, spelling_model: EngineModel
) -> None:
    async def generate_twice() -> list[dict[str, Any]]:
        first = await start(spelling_model)  # with the tests' extension
        other = await VllmGeneration.create(
            section(in_process=True, worker_extension_cls=WORKER_EXTENSION), spelling_model
        )
        try:
            return [await answers(engine, [request("a", max_new_tokens=3)]) for engine in (first, other)]
        finally:
            await first.close()
            await other.close()

    one, another = engine_loop.run(generate_twice())
    assert one["a"].token_ids == another["a"].token_ids
