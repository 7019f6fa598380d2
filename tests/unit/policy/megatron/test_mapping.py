from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nemo_rl.policy.megatron.mapping import (
    Experts,
    GatedRows,
    QueryKeyValue,
    VocabularyRows,
    Weight,
    iter_model_weights,
)
from tests.unit.policy.tiny import llama, mixtral, qwen2, qwen3, qwen3_moe

MODELS = {"qwen2": qwen2, "llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "mixtral": mixtral}


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).unsqueeze(1).expand(-1, 2)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    """Two groups of two queries each; heads of one row."""
    weight = QueryKeyValue("qkv", ("q", "k", "v"), num_groups=2, head_dim=1)
    tensors = [rows(10, 11, 12, 13), rows(20, 21), rows(30, 31)]
    assert weight.shard(tensors, 0, 1)[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert weight.shard(tensors, 1, 2)[:, 0].tolist() == [12, 13, 21, 31]


def test_gate_and_up_lie_on_each_rank() -> None:
    weight = GatedRows("fc1", ("gate", "up"))
    tensors = [rows(10, 11, 12, 13), rows(20, 21, 22, 23)]
    assert weight.shard(tensors, 0, 2)[:, 0].tolist() == [10, 11, 20, 21]
    assert weight.shard(tensors, 1, 2)[:, 0].tolist() == [12, 13, 22, 23]


def test_vocabulary_is_filled_with_zeros() -> None:
    weight = VocabularyRows("embedding", ("embed",), num_tokens=5)
    assert weight.shard([rows(1, 2, 3, 4, 5)], 1, 2)[:, 0].tolist() == [4, 5, 0]


def test_ranks_hold_experts_and_share_each_in_pairs() -> None:
    """Two experts with gates 10, 11 and ups 20, 21, then 30, 31 and 40, 41; ranks 0 and 1 share the first."""
    first = Experts("fc1.{}", ("gate_up",), num_experts=2, num_tensor_ranks=2, is_gated=True)
    tensor = torch.stack([rows(10, 11, 20, 21), rows(30, 31, 40, 41)])
    shards = [first.shard([tensor], rank, 4) for rank in range(4)]
    assert [shard[..., 0].tolist() for shard in shards] == [[[10, 20]], [[11, 21]], [[30, 40]], [[31, 41]]]
    assert torch.equal(first.whole(shards)[0], tensor)
    assert first.tensor_names(4) == ("fc1.0",)
    second = Experts("fc2.{}", ("down",), num_experts=2, num_tensor_ranks=2)
    shards = [second.shard([tensor.transpose(1, 2)], rank, 4) for rank in range(4)]
    assert [shard[:, 0].tolist() for shard in shards] == [[[10, 11]], [[20, 21]], [[30, 31]], [[40, 41]]]
    assert torch.equal(second.whole(shards)[0], tensor.transpose(1, 2))


def mapped(config: PreTrainedConfig, tensors: dict[str, torch.Tensor], size: int) -> Iterator[tuple[Weight, list]]:
    for weight in iter_model_weights(config):
        whole = [tensors[name] for name in weight.sources]
        yield weight, [weight.shard(whole, rank, size) for rank in range(size)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_every_weight_comes_back_exactly(name: str, size: int) -> None:
    model: PreTrainedModel = MODELS[name]()
    tensors = {n: p.detach() for n, p in model.named_parameters()}  # tied ones once
    found: dict[str, torch.Tensor] = {}
    for weight, shards in mapped(model.config, tensors, size):
        assert len({shard.shape for shard in shards}) == 1  # as ranks need that gather
        found |= zip(weight.sources, weight.whole(shards if weight.is_split else shards[:1]), strict=True)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_shards_hold_each_entry_once_unless_they_are_whole(name: str) -> None:
    model: PreTrainedModel = MODELS[name]()
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    for weight, shards in mapped(model.config, tensors, 2):
        entries = sum(tensors[n].numel() for n in weight.sources)
        filling = (-model.config.vocab_size % 2) * model.config.hidden_size if isinstance(weight, VocabularyRows) else 0
        assert shards[0].numel() == ((entries + filling) // 2 if weight.is_split else entries)


@pytest.mark.parametrize("name", MODELS)
def test_no_rank_asks_for_more_of_a_source_than_its_shard_has(name: str) -> None:
    model: PreTrainedModel = MODELS[name]()
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    for weight in iter_model_weights(model.config):
        sources = [tensors[n] for n in weight.read_from]
        for rank in range(2):
            indices = weight.indices([t.shape for t in sources], rank, 2)
            parts = [t[index] for t, index in zip(sources, indices, strict=True)]
            entries = sum(part.numel() for part in parts)
            padding = model.config.hidden_size * (rank * model.config.vocab_size % 2)
            shard = weight.shard([tensors[n] for n in weight.sources], rank, 2)
            assert entries == shard.numel() - padding * isinstance(weight, VocabularyRows)
