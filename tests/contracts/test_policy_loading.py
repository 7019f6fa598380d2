"""Loading a policy: each rank reads its own shards, so that a node never holds the whole model beside them."""

import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.policy.hf_model import LoadedTensors, WeightFiles, load_model
from nemo_rl.policy.ranks import RankLayout
from tests.contracts.layouts import MEGATRON, SPLIT_MODELS
from tests.contracts.policies import clones, make_policy
from tests.contracts.rank_pool import Mesh, RankPool

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


class PeakMemory:
    """The largest memory of its own (without mapped files, whose pages a node holds once) that this process had."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = own_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, own_memory())


def own_memory() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def bytes_beside_shards(layout: RankLayout, *, path: Path, tiny: Path, **config: Any) -> tuple[int, Any]:
    """Return the peak of host memory while loading beyond what was there and what stays, and the loaded weights."""
    config |= {"precision": "bfloat16", "needs_reference": True}
    make_policy(layout, tiny, **config).close()  # whatever the first policy of a process imports
    with PeakMemory() as memory:
        policy = make_policy(layout, path, **config)
    reference = policy._reference
    assert reference is not None
    parameters = [*policy.module.parameters(), *reference.parameters()]
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters] + megatron_tensors(policy)
    stays = sum(tensor.numel() * tensor.element_size() for tensor in local)
    weights = policy.run_with_weights(clones)
    policy.close()
    return memory.peak - memory.before - stays, weights


def megatron_tensors(policy: Any) -> list[torch.Tensor]:
    """Return what a worker on Megatron holds beside the modules' parameters: float32 weights and gradients."""
    if not hasattr(policy, "_main"):
        return []
    return [*policy._main.tensors(), *(buffer.grad_data for buffer in policy._distributed.buffers)]


@pytest.mark.parametrize("mesh", [Mesh(2), MEGATRON["megatron tp 2"]], ids=["fsdp2", "megatron tp 2"])
def test_two_ranks_load_a_model_without_holding_it(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, mesh: Mesh
) -> None:
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    arguments: dict[str, Any] = {"path": tmp_path, "tiny": models["qwen2"], **mesh.config}
    (first, weights), (second, _) = pool.run(mesh, bytes_beside_shards, **arguments)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert first + second <= 0.2 * model_bytes  # with the pages of the files at most 1.2 times the model


def read_and_held(layout: RankLayout, *, path: Path, **config: Any) -> tuple[int, int, bool]:
    """Return bytes read from the files and bytes of the stage, and whether it holds what a whole model in memory gives.

    The files are in float32, as the stage is.
    """
    num_read = 0
    read = WeightFiles.read

    def counted(self: WeightFiles, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        nonlocal num_read
        part = read(self, name, index)
        num_read += part.numel() * part.element_size()
        return part

    with patch.object(WeightFiles, "read", counted):
        policy: Any = make_policy(layout, path, **config)
    held = {id(p): p.detach() for p in policy.module.parameters()}
    expected: dict[int, torch.Tensor] = {}
    whole = LoadedTensors(load_model(str(path), {}).state_dict())
    policy._weights.load(whole, lambda parameter, shard: expected.update({id(parameter): shard.float().clone()}))
    is_equal = held.keys() == expected.keys() and all(torch.equal(held[key], expected[key]) for key in held)
    num_held = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    policy.close()
    return num_read, num_held, is_equal


@pytest.mark.parametrize("model", SPLIT_MODELS)
@pytest.mark.parametrize("layout", ["megatron tp 2", "megatron pp 2", "megatron tp 2 pp 2"])
def test_rank_of_megatron_reads_what_it_holds_and_no_more(
    pool: RankPool, models: dict[str, Path], layout: str, model: str
) -> None:
    mesh, path = MEGATRON[layout], models[model]
    results = pool.run(mesh, read_and_held, path=path, **mesh.config)
    assert all(is_equal for _, _, is_equal in results)
    reader = load_model(str(path), {})
    padding = reader.config.vocab_size % mesh.tensor_parallel_size * reader.config.hidden_size * 4
    size = sum(p.numel() * p.element_size() for p in reader.parameters())
    for num_read, num_held, _ in results:
        assert num_held - 2 * padding <= num_read <= num_held  # zeros that fill the vocabulary are in no file
        assert num_read < 0.8 * size
