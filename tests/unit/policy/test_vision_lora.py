"""LoRA on models that see: adapters of the decoder alone, whose log-probs and gradients are those of peft's model."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from nemo_rl import batch as keys
from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.adapted_layers import select_adapted_modules
from nemo_rl.policy.fsdp2.lora import Adapters
from nemo_rl.policy.hf_model import load_model
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import micro_batches
from tests.fakes.vision import save_vision_model
from tests.support.quick import quick
from tests.unit.policy.test_vision import Vision, score

TOLERANCE = 1e-5
SECTION = LoraAdapterConfig(enabled=True, dim=4, alpha=8)
LAYERS = r".*\.(text_model|language_model)\..*(q|k|v|o|gate|up|down)_proj"


@pytest.fixture(scope="module", params=quick(["idefics3", "qwen2_5_vl", "qwen3_vl"], ["idefics3", "qwen2_5_vl"]))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Vision, Path]:
    """Return a model, and a directory with an adapter that peft made, whose B is not 0."""
    path = tmp_path_factory.mktemp(request.param)
    model, _ = save_vision_model(request.param, path)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS, init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(load_model(str(path), {}), config).save_pretrained(str(path / "adapter"))
    return Vision(path, model), path / "adapter"


@pytest.mark.parametrize("is_packed", [False, True])
def test_logprobs_and_gradients_are_those_of_pefts_model(adapted: tuple[Vision, Path], is_packed: bool) -> None:
    vision, directory = adapted
    model = load_model(str(vision.path), {})
    adapters = Adapters(model, SECTION, base=str(vision.path))
    adapters.load(directory)
    packing_key = "policy.sequence_packing.enabled" if is_packed else None
    module = CausalLogprobs(model, temperature=1.0, chunk_size=4, packing_key=packing_key)
    batch = vision.batch()
    logprobs = torch.zeros(batch[keys.TOKEN_IDS].shape)
    for rows, part in micro_batches(batch, torch.arange(len(batch)), 2):
        scores = score(module, part)
        logprobs[rows, : scores.shape[1]] = scores.detach()
        (scores * part[keys.TOKEN_MASK]).sum().backward()
    with torch.no_grad(), adapters.disabled():
        base = [score(module, vision.batch()[index : index + 1])[0] for index in range(len(batch))]

    plain = load_model(str(vision.path), {})
    truth = PeftModel.from_pretrained(plain, directory, is_trainable=True).eval()
    for index, (row, sampled) in enumerate(zip(vision.rows, vision.num_sampled, strict=True)):
        where = slice(len(row) - sampled, len(row))
        alone = vision.alone(truth.get_base_model(), index)
        torch.testing.assert_close(logprobs[index, where], alone.detach(), atol=TOLERANCE, rtol=0)
        assert (base[index][where] - alone.detach()).abs().max() > 1e-3
        alone.sum().backward()
    expected = {name: p.grad for name, p in truth.get_base_model().named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == expected.keys()
    assert all(".lora_" in name for name in own)
    for name, gradient in own.items():
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient / scale, expected[name] / scale, atol=TOLERANCE, rtol=0, msg=name)


def test_a_saved_adapter_is_read_by_peft(adapted: tuple[Vision, Path], tmp_path: Path) -> None:
    vision, directory = adapted
    model = load_model(str(vision.path), {})
    adapters = Adapters(model, SECTION, base=str(vision.path))
    adapters.load(directory)
    adapters.save(dict(adapters.tensors()), tmp_path)
    first, again = (load_file(path / "adapter_model.safetensors") for path in (directory, tmp_path))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    read = PeftModel.from_pretrained(load_model(str(vision.path), {}), tmp_path)
    assert {name.replace(".default.", ".") for name, _ in read.named_parameters() if ".lora_" in name} == first.keys()


def test_layers_of_the_tower_cannot_be_named(adapted: tuple[Vision, Path]) -> None:
    vision, _ = adapted
    in_tower = "qkv" if "qwen" in vision.model.config.model_type else "out_proj"
    with pytest.raises(ConfigError, match="no linear layer of that name to adapt; known: q_proj, k_proj"):
        select_adapted_modules(vision.model, SECTION.model_copy(update={"target_modules": [in_tower]}))
