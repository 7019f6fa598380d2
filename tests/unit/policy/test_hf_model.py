from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen2Config

from nemo_rl.errors import ConfigError
from nemo_rl.policy.fsdp2.sharding import copy_tensors, materialize
from nemo_rl.policy.hf_model import (
    WeightFiles,
    decoder_layers,
    empty_model,
    freeze_parameters,
    load_config,
    load_model,
    matmul_parameters,
    open_tensors,
    small_model,
    train_flops,
)
from tests.unit.policy.tiny import MODELS, SIZES, saved_model


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


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        load_model(str(tmp_path), {})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_index", [True, False])
def test_model_read_by_slices_is_the_loaded_one(name: str, has_index: bool, tmp_path: Path) -> None:
    path = save(name, tmp_path, max_shard_size="20KB" if has_index else "5GB")
    assert (path / "model.safetensors.index.json").exists() == has_index
    model = empty_model(str(path), {})
    tensors = open_tensors(str(path), model, {})
    assert isinstance(tensors, WeightFiles)
    materialize(model, model, torch.device("cpu"))
    copy_tensors(model, model, tensors)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert len(list(model.parameters())) == len(list(expected.parameters()))  # tied weights are one parameter
    for found, wanted in ((model.state_dict(), expected.state_dict()), (buffers(model), buffers(expected))):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_parts_are_read_alone(tmp_path: Path) -> None:
    path = str(save("llama", tmp_path))
    tensors = open_tensors(path, empty_model(path, {}), {})
    name = "model.layers.1.mlp.down_proj.weight"
    whole = load_model(path, {}).state_dict()[name]
    assert torch.equal(tensors.read(name, (slice(3, 7), slice(10, 48))), whole[3:7, 10:])


def test_other_weights_than_the_models_are_named(tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    file = path / "model.safetensors"
    own = load_file(file)
    missing = {n: t for n, t in own.items() if n != "model.norm.weight"}
    other_shape = own | {"model.norm.weight": torch.ones(31)}
    for tensors, problem in (
        (missing, r"its files lack 1 weights, e\.g\. model\.norm\.weight"),
        (own | {"score.weight": torch.ones(3)}, r"hold 1 weights that the model does not have, e\.g\. score\.weight"),
        (other_shape, r"model\.norm\.weight has the shape \(31,\), not \(32,\)"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=rf"policy\.model_name .*{problem}"):
            open_tensors(str(path), empty_model(str(path), {}), {})


@pytest.mark.parametrize("num_bytes", [0, 7, 2000])
def test_truncated_weights_are_refused(num_bytes: int, tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"policy\.model_name .*its weights cannot be read"):
        open_tensors(str(path), empty_model(str(path), {}), {})


def test_model_without_safetensors_is_loaded_as_a_whole_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save("llama", tmp_path)
    expected = load_file(path / "model.safetensors")
    torch.save(expected, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    tensors = open_tensors(str(path), empty_model(str(path), {}), {})
    assert "has no safetensors files: each process loads the whole model" in caplog.text
    assert all(torch.equal(tensors.read(name, (slice(0, 2),)), expected[name][:2]) for name in expected)


def test_small_model_has_every_kind_of_layer() -> None:
    sizes = {**SIZES, "num_hidden_layers": 6, "vocab_size": 1000}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, layer_types=kinds))
    small = small_model(model, torch.device("cpu"))
    assert small.config.layer_types == kinds[:3]
    assert small(input_ids=torch.arange(5).unsqueeze(0)).logits.shape == (1, 5, 64)
    assert model.config.num_hidden_layers == 6


def save(name: str, directory: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(directory / name, **options)
    return directory / name


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def test_embedding_counts_only_where_it_is_the_output_head_too() -> None:
    qwen2, llama = MODELS["qwen2"](), MODELS["llama"]()
    assert matmul_parameters(qwen2) == sum(p.numel() for p in qwen2.parameters())
    assert matmul_parameters(llama) == sum(p.numel() for p in llama.parameters()) - llama.config.vocab_size * 32


def test_operations_of_one_sequence() -> None:
    config = Qwen2Config(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    assert train_flops(1000, config, [10]) == 6 * 1000 * 10 + 6 * 2 * 8 * 100


def test_parameters_of_a_pattern_are_not_trained() -> None:
    model = MODELS["qwen2"]()
    freeze_parameters(model, ["*.layers.0.*", "*.norm.weight"], key="k")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(".layers.0." in name for name in trained)
    assert "model.norm.weight" not in trained
    assert "model.layers.1.mlp.gate_proj.weight" in trained
    with pytest.raises(ConfigError, match=r"k = \['\*\.gate\.weight'\]: no parameter of the model"):
        freeze_parameters(model, ["*.gate.weight"], key="k")
    with pytest.raises(ConfigError, match="nothing would be trained"):
        freeze_parameters(model, ["*"], key="k")
