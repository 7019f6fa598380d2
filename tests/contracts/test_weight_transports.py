"""Every way for weights brings a real engine exactly the policy's: one suite over those that need no GPU."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.registries import WEIGHT_TRANSPORTS
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed import weight_files
from nemo_rl.distributed.actors import connect
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation import node_file
from nemo_rl.interfaces import Generation
from nemo_rl.weight_manifests import WeightManifest, Weights
from nemo_rl.weight_sync.cuda_ipc import CudaIpc
from nemo_rl.weight_sync.in_process import InProcess
from nemo_rl.weight_sync.nccl import Broadcast
from nemo_rl.weight_sync.object_store import ObjectStore
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.shared_memory import SharedMemory, WeightFile
from nemo_rl.weight_sync.transports import Transport, make_transport
from tests.contracts.engines import UntrainedPolicy, answers, exact_logprobs, request, tiny_model

TRANSPORTS = ["in_process", "shared_memory", "object_store", "gloo", "cuda_ipc", "custom"]


class ThreadPolicy(UntrainedPolicy):
    """Weights are used on a thread, as every real policy does: what waits there for the engine must not block it."""

    async def run_with_weights(self, use: Any) -> Any:
        pairs = [(name, self.published(name, tensor.detach())) for name, tensor in self.model.named_parameters()]
        return await asyncio.to_thread(use, pairs)


class ThroughADirectory:
    """A user's transport: a file in a directory of its own."""

    def __init__(self, directory: str) -> None:
        self._file = WeightFile(Path(directory))

    async def stage(self, policy: Any) -> WeightManifest:
        return await policy.run_with_weights(self._file.write)

    async def deliver(self, policy: Any, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory for files of weights: in shared memory, and of this test alone."""
    with tempfile.TemporaryDirectory(dir=weight_files.default_directory()) as directory:
        monkeypatch.setattr(weight_files, "SHARED_MEMORY", Path(directory))
        yield Path(directory)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path, shared_memory: Path) -> Transport:
    if request.param == "cuda_ipc":
        return CudaIpc(device="cpu", bucket_bytes=50_000)  # less than the embeddings have
    if request.param == "custom":
        keys = {"transport": f"{__name__}:ThroughADirectory", "kwargs": {"directory": str(tmp_path)}}
        slots = (DeviceSlot(0),)
        layout = Layout("cpu", 1, 0, slots, slots, is_split=False, needs_cluster=False)
        return make_transport(WEIGHT_TRANSPORTS.read(keys), layout)
    if request.param == "in_process":
        return InProcess()
    if request.param == "shared_memory":
        return SharedMemory()
    if request.param == "gloo":
        return Broadcast(backend="gloo", timeout_s=120)
    connect(num_cpus=2)
    return ObjectStore()


def test_weights_arrive_exactly_time_after_time_and_a_refusal_is_told(engine_loop, engines, transport, shared_memory):
    engine = engines("vllm in process" if isinstance(transport, InProcess) else "vllm", "tied")

    async def main() -> None:
        sync = TransportWeightSync([(5, 6, 7)], WeightSyncConfig(verify=True), "float32", transport=transport)
        try:
            for version in (1, 2):
                model = tiny_model(tied=True, seed=20 + version)
                await sync.publish(ThreadPolicy(model), engine, weight_version=version)  # type: ignore[arg-type]
                completion = (await answers(engine, [request("a", max_new_tokens=20)]))["a"]
                exact = exact_logprobs(model, (5, 6, 7), completion.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)
                assert completion.weight_versions == (version, version)
            lacking = tiny_model(tied=True)
            lacking.named_parameters = lambda *args, **kwargs: iter([("model.norm.weight", torch.ones(64))])  # type: ignore[method-assign]
            with pytest.raises(WeightSyncError, match="the policy gave no weights for"):
                await sync.publish(ThreadPolicy(lacking), engine, weight_version=3)  # type: ignore[arg-type]
            await engine.resume()
            await sync.publish(ThreadPolicy(model), engine, weight_version=4)  # type: ignore[arg-type]
        finally:
            sync.close()
            node_file.release()

    engine_loop.run(main())
    assert list(shared_memory.iterdir()) == []
