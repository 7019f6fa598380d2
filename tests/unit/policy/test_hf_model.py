from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen2Config

from nemo_rl.distributed.file_names import FilePart, file_parts
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
from tests.unit.policy.tiny import EXPERT_MODELS, MODELS, SIZES, saved_model


class Recorded:
    """A slice of a file that records its reads."""

    def __init__(self, name: str, values: Any, read: list[str]) -> None:
        self._name, self._values, self._read = name, values, read

    def get_shape(self) -> list[int]:
        return self._values.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._read.append(self._name)
        return self._values[index]


def sources(path: str, model: Any) -> dict[FilePart, tuple[Any, str]]:
    """Return the open file and the name in it of each part of a model in one file."""
    parts = file_parts(model)
    assert parts is not None
    file: Any = safe_open(Path(path) / "model.safetensors", "pt")
    return {part: (file, name) for name, part in parts.items() if name in set(file.keys())}


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


@pytest.mark.parametrize("name", MODELS | EXPERT_MODELS)
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


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_are_read_alone_from_files_of_one_each(name: str, tmp_path: Path) -> None:
    """A rank reads the tensors of its own experts and no others, and of those no more than its rows."""
    path = str(save(name, tmp_path))
    model = empty_model(path, {})
    key = "model.layers.1.mlp.experts.gate_up_proj"
    whole = load_model(path, {}).state_dict()[key]
    (opened,) = {id(file): file for file, _ in sources(path, model).values()}.values()
    read: list[str] = []
    slices = {own: Recorded(own, opened.get_slice(own), read) for _, own in sources(path, model).values()}
    recording = SimpleNamespace(get_slice=slices.__getitem__)
    files = WeightFiles(
        {part: (recording, own) for part, (_, own) in sources(path, model).items()},
        {own: tuple(tensor.shape) for own, tensor in model.state_dict().items()},
    )
    width = whole.shape[1] // 2
    assert torch.equal(
        files.read(key, (slice(1, 3), slice(width - 2, width + 5), slice(4, 9))), whole[1:3, width - 2 : width + 5, 4:9]
    )
    assert len(read) == 4
    assert {own.split("experts.")[1].split(".")[0] for own in read} == {"1", "2"}
    read.clear()
    assert torch.equal(files.read(key, (slice(3, 4), slice(0, width), slice(0, 32))), whole[3:4, :width])
    assert len(read) == 1
    assert files.read(key, (slice(2, 2), slice(0, width), slice(0, 32))).shape == (0, width, 32)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_are_read_from_files_that_stack_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(name, tmp_path)
    own = load_model(str(path), {}).state_dict()
    save_file(own, path / "model.safetensors", metadata={"format": "pt"})
    tensors = open_tensors(str(path), empty_model(str(path), {}), {})
    key = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(tensors.read(key, (slice(1, 2), slice(3, 5), slice(0, 7))), own[key][1:2, 3:5, :7])
    assert "whole model" not in caplog.text


def test_a_missing_or_misshapen_expert_is_named(tmp_path: Path) -> None:
    path = save("mixtral", tmp_path)
    file, key = path / "model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    own = load_file(file)
    missing = {n: t for n, t in own.items() if n != key}
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    for tensors, problem in (
        (missing, rf"its files lack 1 weights, e\.g\. {key}"),
        (own | {key: torch.ones(47, 32)}, rf"{stacked} has the shape \(4, 94, 32\), not \(4, 96, 32\)"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=problem):
            open_tensors(str(path), empty_model(str(path), {}), {})


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
    (MODELS | EXPERT_MODELS)[name]().save_pretrained(directory / name, **options)
    return directory / name


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize(("name", "number"), [("qwen3_moe", 2), ("mixtral", 2), ("deepseek_v3", 4)])
def test_small_model_has_few_experts(name: str, number: int) -> None:
    small = small_model(EXPERT_MODELS[name](), torch.device("cpu"))
    experts = [p for key, p in small.named_parameters() if key.endswith("experts.down_proj")]
    assert {len(weight) for weight in experts} == {number}
    assert small(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_embedding_counts_only_where_it_is_the_output_head_too() -> None:
    qwen2, llama = MODELS["qwen2"](), MODELS["llama"]()
    assert matmul_parameters(qwen2) == sum(p.numel() for p in qwen2.parameters())
    assert matmul_parameters(llama) == sum(p.numel() for p in llama.parameters()) - llama.config.vocab_size * 32


def test_of_the_experts_those_of_a_token_count() -> None:
    """2 of 8, in 2 layers of 8 experts with matrices of 32 x 24; the embedding of 38 tokens is only looked up."""
    model = EXPERT_MODELS["qwen3_moe"]()
    everything = sum(p.numel() for p in model.parameters())
    assert matmul_parameters(model) == everything - 38 * 32 - 2 * 6 * 3 * 32 * 24


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
