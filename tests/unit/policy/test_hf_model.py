from pathlib import Path

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import decoder_layers, load_config, load_model
from tests.unit.policy.tiny import saved_model


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
