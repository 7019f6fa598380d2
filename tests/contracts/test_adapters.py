"""Versions of an adapter in vLLM, side by side: log-probs against the adapter model of transformers and peft."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from nemo_rl.config.server import ServerConfig
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.actors import connect
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation import node_file
from nemo_rl.generation.engines import AdapterSlots, EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.interfaces import Generation
from nemo_rl.launch.starting_adapters import adapter_versions, load_adapters
from nemo_rl.types import BASE_VERSION, Completion, GenerationRequest, SamplingParams
from nemo_rl.weight_sync.adapters import AdapterSource
from nemo_rl.weight_sync.cuda_ipc import CudaIpc
from nemo_rl.weight_sync.in_process import InProcess
from nemo_rl.weight_sync.nccl import Broadcast
from nemo_rl.weight_sync.object_store import ObjectStore
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.shared_memory import SharedMemory
from nemo_rl.weight_sync.transports import Transport
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, answers, exact_logprobs, tiny_model
from tests.contracts.test_weight_sync import PROBES

pytestmark = pytest.mark.timeout(600)

RANK, ALPHA, NUM_VERSIONS = 4, 24, 2
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a packed layer without all its parts
PROMPT = tuple(range(20, 110))  # several blocks of the prefix cache
EXACT = {"atol": 1e-5, "rtol": 0}
ResultT = TypeVar("ResultT")


def base_model() -> Any:
    return tiny_model(tied=True, seed=3, num_key_value_heads=2)  # one for each of two workers


class AdaptedModel:
    """The model of transformers and peft, whose adapter of version n has random values of seed n; B is 0 at first."""

    def __init__(self) -> None:
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
        self.module: PeftModel = get_peft_model(base_model(), config).eval()

    def set_version(self, version: int) -> Any:
        generator = torch.Generator().manual_seed(version)
        for name, parameter in self.module.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.data = values * 0 if "lora_B" in name and version == 0 else values
        return self.module


class AdaptedPolicy(UntrainedPolicy):
    """Publishes its adapter as a policy does: under the names of peft's files, B with its scale."""

    async def run_with_weights(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> ResultT:
        assert adapter_only
        tensors = get_peft_model_state_dict(self.model)
        pairs = [
            (name, self.published(name, tensor.detach() * (ALPHA / RANK) if "lora_B" in name else tensor.detach()))
            for name, tensor in tensors.items()
        ]
        return await asyncio.to_thread(use, pairs)  # as every policy does: what waits for the engine must not block it

    async def run_on_all_ranks(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> list[ResultT]:
        return [await self.run_with_weights(use, adapter_only=adapter_only)]


@pytest.fixture(scope="module")
def adapted() -> AdaptedModel:
    return AdaptedModel()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(directory)
    return directory


OTHER_KINDS: dict[str, dict[str, Any]] = {"in process": {"in_process": True}, "tp 2": {"tensor_parallel_size": 2}}


# Runs with background rollouts have an engine of its own process; the others repeat its tests.
@pytest.fixture(scope="module", params=["own process", *(pytest.param(k, marks=pytest.mark.slow) for k in OTHER_KINDS)])
def engine(request: pytest.FixtureRequest, model_path: Path, engine_loop: asyncio.Runner) -> Iterator[VllmGeneration]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        slots = AdapterSlots(RANK, NUM_VERSIONS)
        model = EngineModel(str(model_path), "float32", MAX_MODEL_LEN, "cpu", adapters=slots)
        own = OTHER_KINDS.get(request.param, {})
        section = VllmGenerationConfig(vllm_cfg=VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16, **own))
        started = engine_loop.run(VllmGeneration.create(section, model))
    yield started
    engine_loop.run(started.close())


@pytest.fixture(scope="module")
def transport(engine: VllmGeneration) -> Iterator[Transport]:
    """Return the way that `auto` takes; with tensor parallelism a broadcast to both workers."""
    num_processes = len(engine._pids)
    own = Broadcast(backend="gloo", workers_per_engine=2) if num_processes > 2 else SharedMemory()
    yield own if num_processes else InProcess()
    own.close()


async def publish(
    engine: Generation,
    adapted: AdaptedModel,
    version: int,
    transport: Transport | None = None,
    falsify: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Refit once, by a transport that the caller closes, and verify."""
    policy = AdaptedPolicy(adapted.set_version(version))
    policy.published = falsify or policy.published
    own = transport or SharedMemory()
    sync = TransportWeightSync(PROBES, WeightSyncConfig(), "float32", transport=own, adapter_only=True)
    try:
        await sync.publish(policy, engine, weight_version=version)  # type: ignore[arg-type]
    finally:
        if transport is None:
            own.close()


def asked(name: str, *, under: int | None = None, tokens: Sequence[int] = PROMPT, count: int = 12) -> GenerationRequest:
    return GenerationRequest(name, tuple(tokens), SamplingParams(count), hash(name) % 1000, name, weight_version=under)


def check(adapted: AdaptedModel, completion: Completion, version: int, *, seed: int | None = None) -> None:
    """Compare a completion with the adapter model of `version`, or of `seed`, and the version with what it says."""
    assert (completion.weight_versions, completion.weight_spans) == ((version, version), ())
    model = adapted.set_version(version if seed is None else seed)
    exact = exact_logprobs(model, PROMPT, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), exact, **EXACT)


def test_versions_side_by_side_are_each_exact(
    engine: VllmGeneration, transport: Transport, adapted: AdaptedModel, engine_loop: asyncio.Runner
) -> None:
    """The same prompt under each, twice: the second time its prefix is cached, under two versions."""

    async def main() -> None:
        for version in (0, 1, 2):
            await publish(engine, adapted, version, transport)
        for _ in range(2):
            requests = [asked("newest"), *(asked(f"{v}-{i}", under=v) for v in (1, 2) for i in range(3))]
            completions = await answers(engine, requests)
            for request in requests:
                check(adapted, completions[request.request_id], request.weight_version or 2)
        dropped = await answers(engine, [asked("dropped", under=0)])
        check(adapted, dropped["dropped"], 2)
        assert engine._adapters is not None
        assert engine._adapters.held == (1, 2)

    engine_loop.run(main())


def test_adapters_of_files_are_sampled_by_name_beside_their_base(
    engine: VllmGeneration, adapted: AdaptedModel, engine_loop: asyncio.Runner, tmp_path: Path
) -> None:
    """As a collection loads `server.adapters`; vLLM has no file of them."""
    for name, seed in (("student", 50), ("judge", 51)):
        adapted.set_version(seed).save_pretrained(tmp_path / name)
    directories = {name: str(tmp_path / name) for name in ("student", "judge")}
    config: Any = SimpleNamespace(server=ServerConfig(adapters=directories, model="student"))
    assert adapter_versions(config) == {"judge": 1, "student": 2}

    async def main() -> None:
        await load_adapters(config, engine)
        named = {"sampled": None, "judge": 1, "base": BASE_VERSION}
        completions = await answers(engine, [asked(name, under=version) for name, version in named.items()])
        for name, version, seed in (("sampled", 2, 50), ("judge", 1, 51)):
            check(adapted, completions[name], version, seed=seed)
        with adapted.module.disable_adapter():
            check(adapted, completions["base"], BASE_VERSION, seed=0)

    engine_loop.run(main())


def test_requests_end_under_their_own_version_while_others_come(
    engine: VllmGeneration, transport: Transport, adapted: AdaptedModel, engine_loop: asyncio.Runner
) -> None:
    """More versions run at once than the engine has room for: vLLM evicts adapters and loads them again."""

    async def main() -> None:
        running = {}
        for version in range(10, 16):
            await publish(engine, adapted, version, transport)
            for index in range(2):
                name = f"{version}-{index}"
                running[name] = version, asyncio.create_task(answers(engine, [asked(name, count=200)]))
            await asyncio.sleep(0.05)
        assert engine._adapters is not None
        held = engine._adapters.held
        unfinished = {version for version, task in running.values() if not task.done()}
        assert unfinished <= set(held)
        for name, (version, task) in running.items():
            check(adapted, (await task)[name], version)
        await publish(engine, adapted, 16, transport)
        assert engine._adapters.held == (15, 16)

    engine_loop.run(main())


def test_adapters_outlive_a_refit_of_the_base_model(
    engine: VllmGeneration, adapted: AdaptedModel, engine_loop: asyncio.Runner
) -> None:
    async def main() -> None:
        for version in (20, 21):
            await publish(engine, adapted, version)
        for scale in (1.5, 1 / 1.5):
            base: Any = adapted.module.get_base_model()
            with torch.no_grad():
                base.model.layers[1].self_attn.q_proj.base_layer.weight.mul_(scale)
            await publish_base(engine, base)
            for version in (20, 21):
                completion = (await answers(engine, [asked(f"{version}-{scale}", under=version)])).popitem()[1]
                check(adapted, completion, version)

    engine_loop.run(main())


async def publish_base(engine: VllmGeneration, model: Any) -> None:
    weights = {n.replace(".base_layer", ""): p.detach() for n, p in model.named_parameters() if "lora_" not in n}

    class Base(UntrainedPolicy):
        async def run_with_weights(self, use: Any) -> Any:
            return use(weights.items())

    sync = TransportWeightSync((), WeightSyncConfig(), "float32")
    try:
        await sync.publish(Base(None), engine, weight_version=0)  # type: ignore[arg-type]
    finally:
        sync.close()


def test_a_wrong_adapter_is_found(engine: VllmGeneration, adapted: AdaptedModel, engine_loop: asyncio.Runner) -> None:
    def unscaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor / (ALPHA / RANK) if "lora_B" in name else tensor

    with pytest.raises(WeightSyncError, match="differ from the policy's by"):
        engine_loop.run(publish(engine, adapted, 30, falsify=unscaled))
    engine_loop.run(publish(engine, adapted, 31))


@pytest.mark.parametrize("name", ["gloo", "cuda_ipc", "object_store"])
def test_every_transport_brings_adapters(
    name: str, engine: VllmGeneration, adapted: AdaptedModel, engine_loop: asyncio.Runner
) -> None:
    if len(engine._pids) != 1:
        pytest.skip("one engine in a process of its own is enough")
    if name == "object_store":
        connect(num_cpus=2)
    transports: dict[str, Transport] = {
        "gloo": Broadcast(backend="gloo", timeout_s=120),
        "cuda_ipc": CudaIpc(device="cpu", bucket_bytes=1000),
        "object_store": ObjectStore(),
    }

    async def main() -> None:
        try:
            for version in (40, 41):
                await publish(engine, adapted, version, transports[name])
                check(adapted, (await answers(engine, [asked(name)]))[name], version)
        finally:
            node_file.release()

    engine_loop.run(main())


def test_an_engine_without_room_for_adapters_says_so(engines: Any, adapted: AdaptedModel) -> None:
    for kind in ("hf", "vllm in process"):
        with pytest.raises(WeightSyncError, match="adapters"):
            asyncio.run(publish(engines(kind, "tied"), adapted, 1))


def test_a_refit_carries_the_adapter_and_nothing_else(adapted: AdaptedModel) -> None:
    policy = AdaptedPolicy(adapted.set_version(1))
    tensors = get_peft_model_state_dict(adapted.module)
    transport = SharedMemory()
    try:
        manifest = asyncio.run(transport.stage(AdapterSource(policy)))  # type: ignore[arg-type]
        last = max(manifest.entries, key=lambda entry: entry.offset)
        assert {entry.name for entry in manifest.entries} == tensors.keys()
        assert last.offset + 4 * tensors[last.name].numel() <= 1.05 * sum(t.nbytes for t in tensors.values())
    finally:
        transport.close()
