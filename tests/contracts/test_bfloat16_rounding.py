"""In bfloat16 on a CPU the policy rounds where vLLM does, so that log-probs differ by little more than sums in another
order do: dense layers and experts, with and without norms of heads, in rows and packed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.types import Completion, GenerationRequest
from tests.contracts.engines import MAX_MODEL_LEN, answers, request
from tests.contracts.expert_models import VOCABULARY, expert_model
from tests.contracts.policies import make_policy

pytestmark = pytest.mark.timeout(300)
PACKED: dict[str, Any] = {"sequence_packing": {"enabled": True, "train_mb_tokens": 256, "logprob_mb_tokens": 256}}


def sampled_batch(requests: list[GenerationRequest], completions: dict[str, Completion]) -> TensorDict:
    pairs = [(asked.token_ids, completions[asked.request_id]) for asked in requests]
    lengths = [len(prompt) + len(completion.token_ids) for prompt, completion in pairs]
    token_ids = torch.zeros(len(pairs), max(lengths), dtype=torch.int64)
    mask, logprobs = torch.zeros(token_ids.shape), torch.zeros(token_ids.shape)
    for row, ((prompt, completion), length) in enumerate(zip(pairs, lengths, strict=True)):
        token_ids[row, :length] = torch.tensor([*prompt, *completion.token_ids])
        mask[row, len(prompt) : length] = 1
        logprobs[row, len(prompt) : length] = torch.tensor(completion.logprobs)
    values = {"token_ids": token_ids, "token_mask": mask, "lengths": torch.tensor(lengths), "logprobs": logprobs}
    return TensorDict(values, batch_size=[len(pairs)])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])  # the second has a dense layer and norms of heads
def test_logprobs_of_engine_and_policy_agree(kind: str, tmp_path: Path, engine_loop: asyncio.Runner) -> None:
    expert_model(kind).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    requests = [
        request(str(i), tokens=rng.integers(1, VOCABULARY, rng.integers(3, 60)).tolist(), seed=i, max_new_tokens=16)
        for i in range(24)
    ]

    async def sample() -> dict[str, Completion]:
        cfg = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=24, in_process=True)
        model = EngineModel(str(tmp_path), "bfloat16", MAX_MODEL_LEN, "cpu")
        engine = await VllmGeneration.create(VllmGenerationConfig(vllm_cfg=cfg), model)
        try:
            return await answers(engine, requests)
        finally:
            await engine.close()

    batch = sampled_batch(requests, engine_loop.run(sample()))
    for settings in ({}, PACKED):
        policy = make_policy(SINGLE_RANK, tmp_path, precision="bfloat16", num_samples=24, **settings)
        found = merge_rows([policy.logprobs(batch)], batch)[0]
        policy.close()
        errors = (found - batch["logprobs"]).abs()[batch["token_mask"] > 0]
        assert errors.median() < 1e-3  # a policy that rounds as transformers does is off by 0.008 and more
        assert errors.mean() < 5e-3
        assert errors.max() < 0.1
