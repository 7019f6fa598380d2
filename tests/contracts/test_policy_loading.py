"""Loading a policy: each rank reads its own shards, so that a node never holds the whole model beside them."""

import re
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.policy.ranks import RankLayout
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


def bytes_beside_shards(layout: RankLayout, *, path: Path, tiny: Path) -> tuple[int, Any]:
    """Return the peak of host memory while loading beyond what was there and what stays, and the loaded weights."""
    config: dict[str, Any] = {"precision": "bfloat16", "needs_reference": True}
    make_policy(layout, tiny, **config).close()  # whatever the first policy of a process imports
    with PeakMemory() as memory:
        policy = make_policy(layout, path, **config)
    reference = policy._reference
    assert reference is not None
    parameters = [*policy.module.parameters(), *reference.parameters()]
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    stays = sum(tensor.numel() * tensor.element_size() for tensor in local)
    weights = policy.run_with_weights(clones)
    policy.close()
    return memory.peak - memory.before - stays, weights


def test_two_ranks_load_a_model_without_holding_it(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (first, weights), (second, _) = pool.run(Mesh(2), bytes_beside_shards, path=tmp_path, tiny=models["qwen2"])
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert first + second <= 0.2 * model_bytes  # with the pages of the files at most 1.2 times the model
