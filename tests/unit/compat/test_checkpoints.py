"""`nemo-rl convert` of checkpoints of one process; tests/contracts/test_nemo_rl_checkpoints.py has those of ranks."""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl import cli
from nemo_rl.command_line import ExitCode
from nemo_rl.compat.checkpoint_tensors import _join
from nemo_rl.compat.checkpoints import convert
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.megatron.mapping import iter_model_weights
from nemo_rl.quickstart.models import make_tokenizer
from tests.unit.policy.tiny import saved_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: saved_model(name, directory) for name in ("llama", "qwen2", "qwen3_moe")}


def state_of(model: Path) -> State:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()


def make_step(directory: Path, model: Path | None, recipe: str = "precision: bfloat16") -> Path:
    step = directory / "step_3"
    (step / "policy" / "weights").mkdir(parents=True)
    make_tokenizer().save_pretrained(step / "policy" / "tokenizer")
    name = "" if model is None else f", model_name: {model}"
    (step / "config.yaml").write_text(f"policy: {{{recipe}{name}}}\n")
    return step


def save_wrapped(state: State, weights: Path) -> None:
    dcp.save({"model": state}, checkpoint_id=weights, no_dist=True)


def save_plain(state: State, weights: Path) -> None:
    dcp.save(state, checkpoint_id=weights / "model", no_dist=True)


def save_safetensors(state: State, weights: Path) -> None:
    unshared = {name: tensor.clone() for name, tensor in state.items()}
    writer = HuggingFaceStorageWriter(str(weights / "model"), save_distributed=True)
    dcp.save(unshared, storage_writer=writer, no_dist=True)


def save_megatron(state: State, weights: Path, model: Path) -> None:
    """Save layers one by one, as Megatron does if they differ, and a vocabulary padded by three rows."""
    config = AutoModelForCausalLM.from_pretrained(model).config
    named = {w.name: w.shard([state[name] for name in w.sources], 0, 1) for w in iter_model_weights(config)}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in named:
            named[name] = torch.cat([named[name], torch.zeros(3, named[name].shape[1])])
    named["decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"] = torch.zeros(2)
    dcp.save(named, checkpoint_id=weights / "iter_0000000", no_dist=True)
    (weights / "iter_0000000" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("form", ["wrapped", "plain", "safetensors", "megatron"])
def test_weights_and_tokenizer_are_those_of_the_checkpoint(
    form: str, model: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, output = make_step(tmp_path, models[model]), tmp_path / "out" / "hf"
    state = state_of(models[model])
    torch.manual_seed(0)
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        tensor += torch.rand_like(tensor)  # trained
    save: Callable[[State, Path], None] = {
        "wrapped": save_wrapped,
        "plain": save_plain,
        "safetensors": save_safetensors,
        "megatron": lambda state, weights: save_megatron(state, weights, models[model]),
    }[form]
    save(state, step / "policy" / "weights")
    assert cli.run(["convert", str(step), "-o", str(output)]) == ExitCode.DONE
    assert f"policy.model_name={output}" in capsys.readouterr().out
    found = state_of(output)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert AutoTokenizer.from_pretrained(output).chat_template == make_tokenizer().chat_template
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    assert [path.name for path in output.parent.iterdir()] == ["hf"]


LAYERS = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"]


def save_adapters(weights: Path, model: Path, **config: Any) -> Path:
    """Write the files that NeMo-RL's Automodel writes of LoRA: peft's, in bfloat16, with its own description beside."""
    directory = weights / "model"
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    shapes = {layer: state_of(model)[f"{layer}.weight"].shape for layer in LAYERS}
    sizes = {
        f"{layer}.lora_{part}": (4, n) if part == "A" else (m, 4) for layer, (m, n) in shapes.items() for part in "AB"
    }
    tensors = {
        f"base_model.model.{name}.weight": torch.randn(size, generator=generator).bfloat16()
        for name, size in sizes.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 32, "bias": "none", "use_dora": False,
        "target_modules": LAYERS, "base_model_name_or_path": str(model),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(description | config))
    (directory / "automodel_peft_config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_moe"])
def test_adapters_are_merged_into_the_base_model_bit_for_bit_as_peft_does(
    model: str, models: dict[str, Path], tmp_path: Path
) -> None:
    step, output = make_step(tmp_path, models[model]), tmp_path / "hf"
    adapters = save_adapters(step / "policy" / "weights", models[model])
    convert(step, output)
    base = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapters, autocast_adapter_dtype=True).merge_and_unload().state_dict()
    found, before = state_of(output), state_of(models[model])
    assert found.keys() == expected.keys() == before.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert torch.equal(tensor, before[name]) == (name.removesuffix(".weight") not in LAYERS), name
    assert AutoTokenizer.from_pretrained(output).chat_template == make_tokenizer().chat_template


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_dora": True}, "has use_dora: True: allowed is plain LoRA alone"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
        ({"r": "four"}, "holds no adapter: .*four"),
        ({"r": 0}, "has r: 0; allowed: at least 1"),
        ({"lora_bias": True}, "has lora_bias: True"),
        ({"alora_invocation_tokens": [1, 2]}, r"has alora_invocation_tokens: \[1, 2\]"),
    ],
)
def test_adapters_of_another_form_are_refused_by_its_name(
    config: dict[str, Any], problem: str, models: dict[str, Path], tmp_path: Path
) -> None:
    step = make_step(tmp_path, models["llama"])
    save_adapters(step / "policy" / "weights", models["llama"], **config)
    with pytest.raises(CheckpointError, match=problem):
        convert(step, tmp_path / "out")


def test_adapters_of_layers_that_the_model_lacks_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    step = make_step(tmp_path, models["llama"])
    directory = save_adapters(step / "policy" / "weights", models["llama"])
    tensors = load_file(directory / "adapter_model.safetensors")
    for added, problem in (
        ("model.layers.7.mlp.up_proj.lora_A", r"no layer for, e.g. model\.layers\.7\.mlp\.up_proj"),
        (f"{LAYERS[0]}.lora_magnitude", r"has .*lora_magnitude\.weight: allowed are \.lora_A"),
        (f"{LAYERS[0]}.lora_A", r"q_proj has the shapes \(32, 4\) and \(3, 3\), its weight \(32, 32\)"),
    ):
        save_file(
            {**tensors, f"base_model.model.{added}.weight": torch.ones(3, 3)}, directory / "adapter_model.safetensors"
        )
        with pytest.raises(CheckpointError, match=problem):
            convert(step, tmp_path / "out")


@pytest.mark.parametrize("form", ["wrapped", "plain", "safetensors"])
def test_experts_are_read_one_by_one_as_the_models_files_hold_them(
    form: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model = models["qwen3_moe"]
    state = load_file(model / "model.safetensors")
    assert any("experts.0.gate_proj.weight" in name for name in state)
    trained = {name: tensor + torch.rand_like(tensor) for name, tensor in state.items()}
    step = make_step(tmp_path, model)
    save = {"wrapped": save_wrapped, "plain": save_plain, "safetensors": save_safetensors}[form]
    save(trained, step / "policy" / "weights")
    convert(step, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    assert state_of(tmp_path / "hf").keys() == state_of(model).keys()


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_of_megatron_are_one_tensor_of_a_layer_or_of_all_layers(
    is_stacked: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """As megatron-core's `SequentialMLP` and `TEGroupedMLP` save them: [experts, rows, columns] under `experts`."""
    model, state = models["qwen3_moe"], state_of(models["qwen3_moe"])
    config = AutoModelForCausalLM.from_pretrained(model).config
    named = {w.name: w.shard([state[name] for name in w.sources], 0, 1) for w in iter_model_weights(config)}
    named = {name.replace("mlp.experts.local_experts.{}.", "mlp.experts.experts."): t for name, t in named.items()}
    assert named["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (8, 48, 32)
    if is_stacked:
        layers = {name: tensor for name, tensor in named.items() if name.startswith("decoder.layers.0.")}
        for name in layers:
            pair = [named.pop(name), named.pop(name.replace("layers.0.", "layers.1."))]
            named[name.replace("layers.0.", "layers.")] = torch.stack(pair)
    step = make_step(tmp_path, model)
    weights = step / "policy" / "weights" / "iter_0000000"
    dcp.save(named, checkpoint_id=weights, no_dist=True)
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    convert(step, tmp_path / "hf")
    found, expected = load_file(tmp_path / "hf" / "model.safetensors"), load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class RunsCode:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (self.path,))


@pytest.fixture
def step(models: dict[str, Path], tmp_path: Path) -> Path:
    step = make_step(tmp_path, models["llama"])
    save_plain(state_of(models["llama"]), step / "policy" / "weights")
    return step


def edit_metadata(step: Path, edit: Callable[[Any], object]) -> None:
    path = step / "policy" / "weights" / "model" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def grow(metadata: Any) -> None:
    entry: TensorStorageMetadata = metadata.state_dict_metadata["lm_head.weight"]
    entry.size = torch.Size([2**40, 32])


def leave(metadata: Any) -> None:
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../model/{stored.relative_path}"


def drop_shard(metadata: Any) -> None:
    metadata.state_dict_metadata["lm_head.weight"].chunks.clear()


def rename(metadata: Any) -> None:
    found = metadata.state_dict_metadata
    found["lm_head.lora_A.weight"] = found.pop("lm_head.weight")


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (grow, "is larger than the files"),
        (leave, "is not an uncompressed file of the directory"),
        (drop_shard, "its shards hold 0 of 1184 values"),
        (rename, "lacks 1 weights of the model, e.g. lm_head.weight"),
        (lambda metadata: metadata.state_dict_metadata.update(more=next(iter(metadata.state_dict_metadata.values()))),
         "holds 1 weights that the model does not have, e.g. more"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 7), "cannot be read"),
        (lambda metadata: metadata.storage_data.clear(), "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_descriptions_are_refused(edit: Any, problem: str, step: Path, tmp_path: Path) -> None:
    edit_metadata(step, edit)
    with pytest.raises(CheckpointError, match=problem):
        convert(step, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([((0, 0), torch.ones(1, 2))], "hold 2 of 4 values"),
        ([((0, 0), torch.ones(1, 2)), ((0, 0), torch.ones(1, 2))], r"\(1, 2\) at \(0, 0\) overlaps another"),
        ([((0, 0), torch.ones(2, 2)), ((1, 0), torch.ones(1, 2))], r"\(1, 2\) at \(1, 0\) overlaps another"),
        ([((1, 0), torch.ones(2, 2))], "does not fit"),
        ([((-1, 0), torch.ones(1, 2))], "does not fit"),
        ([((0, 0), torch.ones(1, 2)), ((1, 0), torch.ones(1, 2, dtype=torch.bfloat16))], "does not fit"),
    ],
)
def test_shards_cover_a_tensor_once(parts: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        _join((2, 2), iter(parts))


def test_pickled_code_does_not_run(step: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    directory = step / "policy" / "weights" / "model"
    edit_metadata(step, lambda metadata: setattr(metadata, "planner_data", RunsCode(trap)))
    convert(step, tmp_path / "out")  # what is not read may be anything
    stream = io.BytesIO()
    torch.save(RunsCode(trap), stream)
    (file,) = directory.glob("*.distcp")
    file.write_bytes(stream.getvalue().ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(step, tmp_path / "other")
    (directory / ".metadata").write_bytes(pickle.dumps(RunsCode(trap)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(step, tmp_path / "other")
    assert not trap.exists()


def test_other_directories_are_refused_with_what_to_do(models: dict[str, Path], step: Path, tmp_path: Path) -> None:
    weights = step / "policy" / "weights"
    with pytest.raises(ConfigError, match=r"output = .* exists already"):
        convert(step, tmp_path)
    with pytest.raises(CheckpointError, match=f"policy.model_name={models['llama']}"):
        convert(models["llama"], tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"lacks|holds"):
        convert(step, tmp_path / "out", model_name=str(models["qwen2"]))
    (step / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="name it with --model"):
        convert(weights, tmp_path / "out")
    convert(weights / "model", tmp_path / "named", model_name=str(models["llama"]))
    shutil.rmtree(weights / "model")
    with pytest.raises(ConfigError, match=r"no checkpoint of NeMo-RL: it has neither"):
        convert(step, tmp_path / "out")
