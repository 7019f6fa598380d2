"""Weights that stay on CUDA devices: a real engine samples under exactly the policy's; skipped without devices."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config.policy import ColocatedConfig
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.weight_sync.cuda_ipc import CudaIpc
from nemo_rl.weight_sync.nccl import Broadcast
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.transports import Transport
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, save_tiny_model, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class DevicePolicy(UntrainedPolicy):
    """Publishes from a CUDA device, on a thread; its own log-probs are computed on the CPU."""

    def __init__(self, model: Any, device: str) -> None:
        super().__init__(model)
        self.device = torch.device(device)

    async def run_with_weights(self, use: Any) -> Any:
        pairs = [(name, tensor.detach().to(self.device)) for name, tensor in self.model.named_parameters()]

        def used() -> Any:
            torch.cuda.set_device(self.device)
            return use(pairs)

        return await asyncio.to_thread(used)


def refit_twice(directory: Path, transport: Transport, policy_device: str) -> None:
    """Both refits are verified, against log-probs in float32."""
    cfg = VllmConfig(gpu_memory_utilization=0.3, max_num_seqs=16, enable_sleep_mode=False)
    section = VllmGenerationConfig(vllm_cfg=cfg, colocated=ColocatedConfig(enabled=policy_device == "cuda:0"))

    async def main() -> None:
        engine = await VllmGeneration.create(
            section, EngineModel(str(save_tiny_model(directory, tied=True)), "float32", MAX_MODEL_LEN, "cuda")
        )
        sync = TransportWeightSync(
            [(5, 6, 7), (250, 3)], WeightSyncConfig(verify=True), "float32", device="cuda", transport=transport
        )
        try:
            for version in (1, 2):
                policy = DevicePolicy(tiny_model(tied=True, seed=version), policy_device)
                await sync.publish(policy, engine, weight_version=version)  # type: ignore[arg-type]
        finally:
            sync.close()
            await engine.close()

    asyncio.run(main())


def test_cuda_ipc(tmp_path: Path) -> None:
    refit_twice(tmp_path, CudaIpc(), "cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one rank per device, hence two devices")
def test_nccl(tmp_path: Path) -> None:
    refit_twice(tmp_path, Broadcast(backend="nccl", timeout_s=120), "cuda:1")
