"""Slices of packed rows, and which models can be computed by slices."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from nemo_rl.errors import ConfigError
from nemo_rl.policy.attention import PackedSequences
from nemo_rl.policy.context_parallel import ContextRanks, SlicedSequences, sliced_tokens
from nemo_rl.policy.context_parallel import check_context_parallel as probe
from nemo_rl.policy.fsdp2.backend import DTensorConfig, check_context_parallel, check_sequence_parallel
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.tiny import MODELS, SIZES

CPU = torch.device("cpu")
KEY = "policy.dtensor_cfg.context_parallel_size"
NO_GROUP: Any = None


def slices(lengths: tuple[int, ...], size: int) -> list[SlicedSequences]:
    pack = PackedSequences.of(lengths, max(lengths), CPU)
    return [SlicedSequences.of(pack, ContextRanks(NO_GROUP, rank, size)) for rank in range(size)]


def test_slices_are_parts_of_the_row_and_the_last_is_padded() -> None:
    first, second = slices((4, 1, 2), 2)
    ids = torch.tensor([[11, 12, 13, 14], [21, 0, 0, 0], [31, 32, 0, 0]])
    assert first.model_inputs(ids)["input_ids"].tolist() == [[11, 12, 13, 14]]
    assert second.model_inputs(ids)["input_ids"].tolist() == [[21, 31, 32, 0]]
    assert second.model_inputs(ids)["position_ids"].tolist() == [[0, 0, 1, 0]]
    assert second.row.lengths == (4, 1, 2, 1)  # as attention sees it
    assert second.row.bounds.tolist() == [0, 4, 5, 7, 8]
    assert [sliced_tokens(7, one.ranks, CPU).tolist() for one in (first, second)] == [[True] * 4, [True] * 3 + [False]]


def test_a_token_is_scored_by_the_rank_that_has_the_one_before_it() -> None:
    """Slices a0 a1 a2 and a3 b0 b1: a3 is scored by the first."""
    needed = torch.tensor([[False, True, False, True], [False, True, False, False]])
    first, second = (one.share(needed) for one in slices((4, 2), 2))
    assert (first.predictors.tolist(), first.part) == ([0, 2], slice(0, 2))
    assert (second.predictors.tolist(), second.part) == ([1], slice(2, 3))
    assert first.sizes == second.sizes == (2, 1)


def test_columns_of_a_slice_beyond_the_row_are_padding() -> None:
    *_, last = slices((3,), 4)
    assert last.lay_out(torch.ones(1, 3, 2, 2)).tolist() == [[[[0.0, 0.0], [0.0, 0.0]]]]
    assert last.share(torch.tensor([[False, True, True]])).sizes == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("config", "size", "tensor", "said"),
    [
        (Qwen2Config(num_attention_heads=28, num_key_value_heads=4), 3, 1, r"heads 28; allowed: 1, 2, 4, 7, 14, 28$"),
        (Qwen3Config(num_attention_heads=8, num_key_value_heads=2), 8, 2, r"heads 4 of a rank; allowed: 1, 2, 4$"),
        (Qwen3NextConfig(), 2, 1, r"'qwen3_next' have layers of linear_attention, whose rows cannot be cut"),
        (
            Phi3Config(rope_parameters={"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
                                        "rope_theta": 1e4, "original_max_position_embeddings": 4096}, pad_token_id=0),
            2, 1, r"rotary embedding \(longrope\) follows the length of a row",
        ),
        (MambaConfig(), 2, 1, "layers of linear_attention"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused_by_name(config: Any, size: int, tensor: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_context_parallel(size, config, tensor=tensor)
    check_context_parallel(1, config, tensor=tensor)


def test_sequence_parallelism_has_plans_of_dense_models() -> None:
    with pytest.raises(
        ConfigError, match=r"sequence_parallel = True: no plan for models of type 'qwen3_moe'; .*qwen3;"
    ):
        check_sequence_parallel(True, Qwen3MoeConfig())
    check_sequence_parallel(True, Qwen3Config())
    check_sequence_parallel(False, Qwen3MoeConfig())
    assert not DTensorConfig(sequence_parallel=True).splits_residual  # one rank has all tokens
    assert DTensorConfig(sequence_parallel=True, tensor_parallel_size=2).splits_residual


def test_a_slice_has_a_part_for_each_tensor_parallel_rank() -> None:
    ranks = ContextRanks(NO_GROUP, 1, 2, parts=4)
    row = SlicedSequences.of(PackedSequences.of((5, 4), 5, CPU), ranks)
    assert (row.size, row.row.lengths) == (8, (5, 4, 7))
    assert sliced_tokens(9, ranks, CPU).tolist() == [True] + [False] * 7


@pytest.mark.parametrize("name", MODELS)
def test_models_with_attention_alone_between_tokens_pass_the_probe(name: str) -> None:
    assert CausalLogprobs(MODELS[name](), temperature=1.0, chunk_size=None, context=(KEY, 2)).is_packed


def test_attention_sinks_are_refused() -> None:
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes))
    with pytest.raises(
        ConfigError, match=rf"{KEY} = 2: the attention sinks of models of type 'gpt_oss' are not divided"
    ):
        probe(model, KEY, 2)


def test_states_are_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match=rf"{KEY} = 2: models of type 'mamba'"):
        probe(model, KEY, 2)


class ShiftedTokens(nn.Module):
    """Adds a token's own position's neighbour within a sample: what packing allows, and slices lose."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    @property
    def weight(self) -> torch.Tensor:
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.table(ids)
        before = nn.functional.pad(embedded[:, :-1], (0, 0, 1, 0))
        is_first = (ids == 0).unsqueeze(-1)  # as the probes' sequences begin
        return embedded + before.masked_fill(is_first, 0)


def test_tokens_that_pass_on_beside_attention_are_refused() -> None:
    model = MODELS["llama"]()
    model.set_input_embeddings(ShiftedTokens(model.get_input_embeddings()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="models of type 'llama' pass tokens on beside attention; allowed: 1"):
        probe(model, KEY, 2)


def test_the_balance_of_experts_does_not_go_with_auto() -> None:
    problem = "the balance of experts .*'qwen3_moe'.*; allowed: a number"
    with pytest.raises(ConfigError, match=problem):
        DTensorConfig(context_parallel_size="auto").check_model(Qwen3MoeConfig(), key="policy.dtensor_cfg")
    DTensorConfig(context_parallel_size="auto").check_model(Qwen2Config(), key="policy.dtensor_cfg")
