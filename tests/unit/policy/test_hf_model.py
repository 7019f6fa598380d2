from pathlib import Path

import pytest
from transformers import Qwen2Config

from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import decoder_layers, load_config, load_model, matmul_parameters, train_flops
from tests.unit.policy.tiny import MODELS, saved_model


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    path = str(saved_model("qwen2", tmp_path))
    model = load_model(path, {"num_hidden_layers": 1, "rope_parameters": {"rope_theta": 500.0}})
    assert len(decoder_layers(model)) == 1
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert model.config.rope_parameters["rope_type"] == "default"


def test_unknown_override_names_the_nearest_key(tmp_path: Path) -> None:
    path = str(saved_model("qwen2", tmp_path))
    with pytest.raises(ConfigError, match=r"policy\.hf_config_overrides\.num_layerz .*unknown key"):
        load_config(path, {"num_layerz": 1})
    with pytest.raises(ConfigError, match=r"did you mean policy\.hf_config_overrides\.num_hidden_layers\?"):
        load_config(path, {"num_hiden_layers": 1})


def test_files_that_lack_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name .*lack 12 weights"):
        load_model(str(saved_model("qwen2", tmp_path)), {"num_hidden_layers": 3})


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        load_model(str(tmp_path), {})


def test_operations_of_one_sequence() -> None:
    config = Qwen2Config(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    assert train_flops(1000, config, [10]) == 6 * 1000 * 10 + 6 * 2 * 8 * 100


def test_embedding_counts_only_where_it_is_the_output_head_too() -> None:
    qwen2, llama = MODELS["qwen2"](), MODELS["llama"]()
    assert matmul_parameters(qwen2) == sum(p.numel() for p in qwen2.parameters())
    assert matmul_parameters(llama) == sum(p.numel() for p in llama.parameters()) - 37 * 32
