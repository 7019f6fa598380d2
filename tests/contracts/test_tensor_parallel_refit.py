"""The refit by `cuda_ipc` of an engine over two devices, on a CPU: two policy ranks in processes of their own hand the
weights to the two workers of a real vLLM with tensor_parallel_size 2, through memory shared by file descriptors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from nemo_rl.distributed.tensor_transfer import new_token
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.weight_manifests import DeviceWeights
from nemo_rl.weight_sync.cuda_ipc import HandOverWeights
from nemo_rl.weight_sync.shared_memory import WeightFile
from tests.contracts.engines import MAX_MODEL_LEN, answers, exact_logprobs, request, tiny_model
from tests.contracts.layouts import MEGATRON
from tests.contracts.policies import make_policy
from tests.contracts.rank_pool import Mesh, RankPool

pytestmark = pytest.mark.timeout(900)
WAIT_S = 300.0
BUCKET_BYTES = 50_000  # less than the embedding has


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    directory = tmp_path_factory.mktemp("seeds")
    for seed in (1, 2):
        model = tiny_model(tied=True, seed=seed, num_key_value_heads=2)  # one for each worker
        model.save_pretrained(directory / str(seed))
    return {seed: directory / str(seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def engine(models: dict[int, Path], engine_loop: asyncio.Runner) -> Iterator[VllmGeneration]:
    section = VllmGenerationConfig(
        vllm_cfg=VllmConfig(tensor_parallel_size=2, kv_cache_memory_bytes=2**25, max_num_seqs=4),
        vllm_kwargs={"worker_extension_cls": "tests.contracts.worker_extension.LoadingFromItsRank"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        model = EngineModel(str(models[1]), "float32", MAX_MODEL_LEN, "cpu")
        started = engine_loop.run(VllmGeneration.create(section, model))
    yield started
    engine_loop.run(started.close())


def sender(token: str, rank: int) -> HandOverWeights:
    """Return what a policy rank calls with its weights; the token stands for its device, which on a CPU all share."""
    return HandOverWeights(f"{token}{rank}", WAIT_S, "cpu", num_receivers=1, bucket_bytes=BUCKET_BYTES)


def plain_model(path: Path) -> Any:
    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def named_weights(path: Path) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in plain_model(path).named_parameters()]


def hand_over(layout: RankLayout, *, path: Path, token: str, **config: Any) -> str | None:
    """Hand over the weights that this rank gathers; return what went wrong."""
    policy = make_policy(layout, path, **config)
    try:
        return policy.run_on_rank(sender(token, layout.rank))
    finally:
        policy.close()


def refit(runner: asyncio.Runner, pool: RankPool, engine: VllmGeneration, mesh: Mesh, path: Path) -> None:
    """Let the two ranks of a policy refit the engine's two workers."""
    token = new_token()

    async def main() -> None:
        _, problems = await asyncio.gather(
            engine.update_weights(DeviceWeights(token, WAIT_S), 1),
            asyncio.to_thread(pool.run, mesh, hand_over, path=path, token=token, **mesh.config),
        )
        assert problems == [None, None]

    runner.run(main())


def load_from_file(runner: asyncio.Runner, engine: VllmGeneration, path: Path) -> None:
    """Refit through a file that all workers map: the transport `shared_memory`."""
    file = WeightFile()
    try:
        manifest = file.write(named_weights(path))
        runner.run(engine.update_weights(manifest, 1))
    finally:
        file.close()


def ask_workers(runner: asyncio.Runner, engine: VllmGeneration, method: str) -> list[Any]:
    return runner.run(engine._engine.collective_rpc(method))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(2), Mesh(1, 2), MEGATRON["megatron dp 2"], MEGATRON["megatron tp 2"], MEGATRON["megatron pp 2"]],
    ids=["fsdp2", "fsdp2 tp 2", "megatron dp 2", "megatron tp 2", "megatron pp 2"],
)
def test_every_worker_builds_its_part_from_what_its_own_rank_sends(
    engine_loop: asyncio.Runner, pool: RankPool, engine: VllmGeneration, models: dict[int, Path], mesh: Mesh
) -> None:
    load_from_file(engine_loop, engine, models[1])
    expected = ask_workers(engine_loop, engine, "digest_weights")
    assert expected[0] != expected[1]  # each worker holds other parts
    load_from_file(engine_loop, engine, models[2])
    assert set(expected).isdisjoint(ask_workers(engine_loop, engine, "digest_weights"))

    refit(engine_loop, pool, engine, mesh, models[1])
    assert ask_workers(engine_loop, engine, "digest_weights") == expected
    names = [name for name, _ in named_weights(models[1])]
    first, second = ask_workers(engine_loop, engine, "received_names")
    assert first == second
    assert first == names if mesh.backend == "fsdp2" else sorted(first) == sorted(names)  # Megatron has its own order
    completion = engine_loop.run(answers(engine, [request("a", max_new_tokens=20)]))["a"]
    exact = exact_logprobs(plain_model(models[1]), (5, 6, 7), completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


def test_no_worker_takes_the_weights_of_another_rank(
    engine_loop: asyncio.Runner, engine: VllmGeneration, models: dict[int, Path]
) -> None:
    """The two senders have different models, as ranks of one policy never do."""
    digests = {}
    for seed, path in models.items():
        load_from_file(engine_loop, engine, path)
        digests[seed] = ask_workers(engine_loop, engine, "digest_weights")
    for first, second in ((1, 2), (2, 1)):
        token = new_token()

        async def main(token: str = token, seeds: tuple[int, int] = (first, second)) -> None:
            sent = [
                asyncio.to_thread(sender(token, rank), named_weights(models[seed])) for rank, seed in enumerate(seeds)
            ]
            _, *problems = await asyncio.gather(engine.update_weights(DeviceWeights(token, WAIT_S), 1), *sent)
            assert problems == [None, None]

        engine_loop.run(main())
        assert ask_workers(engine_loop, engine, "digest_weights") == [digests[first][0], digests[second][1]]
