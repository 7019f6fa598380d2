"""An engine's routes are those of transformers: through chunks, cached prefixes, preemption and updates in flight."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.hf import HFGeneration
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.fsdp2.worker import named_weights
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.token_columns import ROUTED_EXPERTS
from nemo_rl.types import Completion, GenerationRequest
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, answers, request
from tests.contracts.expert_models import VOCABULARY, batch_with_routes, expert_model, hf_routes
from tests.contracts.layouts import BATCHING, FSDP2, LENGTHS, assert_near, assert_same_metrics
from tests.contracts.policies import SGD, clones, play
from tests.contracts.rank_pool import RankPool
from tests.unit.policy.tiny import WeightedNLL

pytestmark = pytest.mark.timeout(600)
FEW_BLOCKS = 36 * 32 * 1536  # bytes: some of 20 requests of up to 128 tokens are preempted
MODELS = {kind: [expert_model(kind, seed) for seed in (0, 1)] for kind in ("qwen3_moe", "mixtral")}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("experts")
    for kind, (model, _) in MODELS.items():
        model.save_pretrained(directory / kind)
    return {kind: directory / kind for kind in MODELS}


async def vllm(directory: Path, *, in_process: bool, kv_bytes: int = 2**25, **kwargs: Any) -> VllmGeneration:
    seeds = "enable_chunked_prefill" not in kwargs  # both together kill vLLM's CPU engine
    cfg = VllmConfig(kv_cache_memory_bytes=kv_bytes, max_num_seqs=20, in_process=in_process, seed_requests=seeds)
    extension = {"worker_extension_cls": "tests.contracts.worker_extension.CountingPreemptions", "block_size": 32}
    section = VllmGenerationConfig(vllm_cfg=cfg, vllm_kwargs=extension | kwargs)
    return await VllmGeneration.create(
        section, EngineModel(str(directory), "float32", MAX_MODEL_LEN, "cpu", records_routes=True)
    )


@pytest.fixture(scope="module")
def crowded(directories: dict[str, Path], engine_loop: asyncio.Runner) -> Iterator[Any]:
    """Start an engine that computes prompts in chunks of at most 96 tokens and has a small cache."""
    limits = {"max_model_len": 256, "enable_chunked_prefill": True, "max_num_batched_tokens": 96}
    engine = engine_loop.run(vllm(directories["qwen3_moe"], in_process=True, kv_bytes=FEW_BLOCKS, **limits))
    yield engine
    engine_loop.run(engine.close())


@pytest.fixture(scope="module")
def roomy(directories: dict[str, Path], engine_loop: asyncio.Runner) -> Iterator[Any]:
    engine = engine_loop.run(vllm(directories["mixtral"], in_process=True))
    yield engine
    engine_loop.run(engine.close())


def mixed_requests(count: int, *, seed: int, longest: int = 39) -> list[GenerationRequest]:
    """Return prompts of 3 to 160 tokens, every other one with the same first 70, and of 1 to `longest` more."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, VOCABULARY, 70).tolist()
    prompts = [
        (shared if i % 2 else []) + rng.integers(1, VOCABULARY, rng.integers(3, 90)).tolist() for i in range(count)
    ]
    return [
        request(f"{seed}-{i}", tokens=prompt, seed=i, max_new_tokens=int(rng.integers(1, longest + 1)))
        for i, prompt in enumerate(prompts)
    ]


def rows_of(completion: Completion, prompt: Sequence[int]) -> torch.Tensor:
    """Return the experts of all tokens but the last, ascending; check that of the last there are none."""
    column = completion.columns[ROUTED_EXPERTS]
    assert column.dtype == np.uint8
    assert len(column) == len(prompt) + len(completion.token_ids)
    assert (column[-1] == 255).all()
    return torch.from_numpy(column[:-1].astype(np.int64)).sort(-1).values


def assert_routes_of(model: Any, completions: dict[str, Completion], requests: Sequence[GenerationRequest]) -> None:
    for asked in requests:
        completion = completions[asked.request_id]
        expected = hf_routes(model, [*asked.token_ids, *completion.token_ids[:-1]])
        assert torch.equal(rows_of(completion, asked.token_ids), expected), asked.request_id


class ExpertPolicy(UntrainedPolicy):
    """Publishes as FSDP2 does: one tensor per expert, under the names of the model's files."""

    async def run_with_weights(self, use: Any) -> Any:
        return use(named_weights(self.model, torch.float32))


async def publish(engine: Any, model: Any, weight_version: int, *, keep_cache: bool) -> None:
    sync = TransportWeightSync([], WeightSyncConfig(), "float32", keep_cache=keep_cache)
    sync._num_verified[engine] = 2
    try:
        await sync.publish(ExpertPolicy(model), engine, weight_version=weight_version)  # type: ignore[arg-type]
    finally:
        sync.close()


def test_routes_of_200_requests_are_those_of_transformers_through_a_small_cache(
    crowded: Any, engine_loop: asyncio.Runner
) -> None:
    """Prompts are computed in chunks, half begin alike, requests are preempted, and new weights come in between."""
    old, new = MODELS["qwen3_moe"]
    requests = mixed_requests(200, seed=3)

    async def main() -> dict[str, Completion]:
        completions: dict[str, Completion] = {}
        update: asyncio.Task[None] | None = None
        async for completion in crowded.generate(requests):
            completions[completion.request_id] = completion
            if len(completions) >= 80 and update is None:
                update = asyncio.create_task(publish(crowded, new, 1, keep_cache=False))
        await publish(crowded, old, 2, keep_cache=False)
        return completions

    completions = engine_loop.run(main())
    ((num_preemptions, num_kept),) = engine_loop.run(crowded._engine.collective_rpc("route_state"))
    versions = {asked.request_id: completions[asked.request_id].weight_versions for asked in requests}
    assert num_preemptions > 0
    assert num_kept <= 20
    assert set(versions.values()) == {(0, 0), (0, 1), (1, 1)}
    for version, model in enumerate((old, new)):  # an update computes all keys and values of running requests again
        assert_routes_of(model, completions, [r for r in requests if versions[r.request_id][1] == version])


def test_rows_of_a_cache_that_an_update_keeps_are_those_of_the_old_weights(
    roomy: Any, engine_loop: asyncio.Runner
) -> None:
    old, new = MODELS["mixtral"]
    asked = request("long", tokens=range(5, 45), max_new_tokens=300)

    async def main() -> Completion:
        under_way = asyncio.Event()
        streamed = replace(asked, on_tokens=lambda start, new: under_way.set() if start > 20 else None)
        running = asyncio.create_task(answers(roomy, [streamed]))
        await under_way.wait()
        await publish(roomy, new, 1, keep_cache=True)
        completion = (await running)["long"]
        await publish(roomy, old, 2, keep_cache=False)
        return completion

    completion = engine_loop.run(main())
    tokens = [*asked.token_ids, *completion.token_ids]
    cut = len(asked.token_ids) + completion.weight_spans[0].end - 1  # its last token was computed by the new weights
    cache = DynamicCache(config=old.config)
    expected = torch.cat([hf_routes(old, tokens[:cut], cache), hf_routes(new, tokens[cut:-1], cache)])
    assert torch.equal(rows_of(completion, asked.token_ids), expected)
    assert not torch.equal(expected[cut:], hf_routes(old, tokens[:-1])[cut:])


def test_an_engine_on_a_thread_gives_the_routes_of_prompt_and_response(roomy: Any, engine_loop: asyncio.Runner) -> None:
    requests = mixed_requests(12, seed=4, longest=20)
    assert_routes_of(MODELS["mixtral"][0], engine_loop.run(answers(roomy, requests)), requests)


@pytest.mark.parametrize(("engine_kind", "kind"), [("hf", "qwen3_moe"), ("hf", "mixtral"), ("vllm", "qwen3_moe")])
def test_other_engines_give_the_routes_of_prompt_and_response(
    engine_kind: str, kind: str, directories: dict[str, Path], engine_loop: asyncio.Runner
) -> None:
    requests = mixed_requests(12, seed=4, longest=20)

    async def main() -> dict[str, Completion]:
        if engine_kind == "hf":
            engine: Any = HFGeneration(str(directories[kind]), max_batch_size=5, records_routes=True)
        else:
            engine = await vllm(directories[kind], in_process=False)
        try:
            return await answers(engine, requests)
        finally:
            await engine.close()

    assert_routes_of(MODELS[kind][0], engine_loop.run(main()), requests)


def test_aborted_requests_leave_no_routes_behind(crowded: Any, engine_loop: asyncio.Runner) -> None:
    async def main() -> tuple[int, int]:
        for round_ in range(3):
            running = [asyncio.create_task(answers(crowded, [r])) for r in mixed_requests(30, seed=10 + round_)]
            await asyncio.sleep(0.05 * (round_ + 1))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for name in "ab":  # the second step of the engine knows that the aborted requests have ended
            await answers(crowded, [request(name, max_new_tokens=3)])
        return (await crowded._engine.collective_rpc("route_state"))[0]

    assert engine_loop.run(main())[1] <= 1  # the last request's own, which the next step would forget


@pytest.mark.parametrize("batching", BATCHING)
def test_replay_on_two_ranks_is_that_of_one(batching: str, pool: RankPool, directories: dict[str, Path]) -> None:
    batch = batch_with_routes(LENGTHS, 2)
    config = {"optimizer": SGD, "router_replay": {"enabled": True}, **BATCHING[batching]}
    calls = [("logprobs", batch), ("train_step", batch, WeightedNLL()), ("run_with_weights", clones)]
    arguments: dict[str, Any] = {"path": directories["qwen3_moe"], "calls": calls, "config": config}
    logprobs, metrics, weights = pool.run(FSDP2["2 ranks"], play, **arguments)[0]
    expected_logprobs, expected, expected_weights = play(SINGLE_RANK, **arguments)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    assert_near(weights, expected_weights)
    assert_same_metrics(metrics, expected)
    assert metrics["moe/other_experts"] == 0
    assert 0 < metrics["moe/missing_routes"] < 1


def test_without_routes_an_answer_has_no_column(directories: dict[str, Path], engine_loop: asyncio.Runner) -> None:
    async def main() -> Completion:
        engine = HFGeneration(str(directories["mixtral"]))
        try:
            return (await answers(engine, [request("a")]))["a"]
        finally:
            await engine.close()

    assert not engine_loop.run(main()).columns
