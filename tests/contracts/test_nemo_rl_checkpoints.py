"""Checkpoints as NeMo-RL writes them, on several ranks, become Hugging Face directories with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from nemo_rl.compat.checkpoints import convert
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.quickstart.models import make_tokenizer
from tests.contracts.layouts import MULTIPLE, SPLIT_MODELS
from tests.contracts.policies import SGD, make_policy
from tests.contracts.rank_pool import RankPool
from tests.support.quick import quick


def save_plain(layout: RankLayout, *, path: Path, weights: Path, form: str) -> None:
    """Save as a DTensor policy does: before 0.6 wrapped, later without, by default as shards of safetensors."""
    policy = make_policy(layout, path, optimizer=SGD)
    state = get_model_state_dict(policy.module, options=StateDictOptions(cpu_offload=True))
    state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    try:
        if form == "wrapped":
            dcp.save({"model": state}, checkpoint_id=weights)
        elif form == "plain":
            dcp.save(state, checkpoint_id=weights / "model")
        else:
            state.pop("lm_head.weight" if policy._model.config.tie_word_embeddings else "", None)
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(weights / "model"), save_distributed=True))
    finally:
        policy.close()


def save_megatron(layout: RankLayout, *, path: Path, weights: Path, megatron_cfg: dict[str, object]) -> None:
    """Save as a Megatron policy does, by megatron-core's own state dict and writer."""
    from megatron.core import dist_checkpointing

    policy = make_policy(layout, path, optimizer=SGD, megatron_cfg=megatron_cfg)
    directory = weights / "iter_0000000"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        stage: Any = policy.module
        dist_checkpointing.save({"model": stage.sharded_state_dict(), "iteration": 7}, str(directory))
    finally:
        policy.close()


def check_converted(step: Path, model: Path) -> None:
    output = step.with_name("converted")
    convert(step, output, model_name=str(model))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def step(tmp_path: Path) -> Path:
    step = tmp_path / "step_4"
    make_tokenizer().save_pretrained(step / "policy" / "tokenizer")
    return step


@pytest.mark.parametrize("form", ["wrapped", "plain", "safetensors"])
@pytest.mark.parametrize("layout", quick(["2 ranks", "2 x tp 2"], ["2 x tp 2"]))
def test_dtensor(layout: str, form: str, pool: RankPool, models: dict[str, Path], step: Path) -> None:
    model = models["llama" if form == "plain" else "qwen2"]
    pool.run(MULTIPLE[layout], save_plain, path=model, weights=step / "policy" / "weights", form=form)
    check_converted(step, model)


@pytest.mark.parametrize("layout", ["megatron tp 2", "megatron tp 2 pp 2"])
@pytest.mark.parametrize("model", quick(SPLIT_MODELS, ["qwen3"]))
def test_megatron(layout: str, model: str, pool: RankPool, models: dict[str, Path], step: Path) -> None:
    mesh, weights = MULTIPLE[layout], step / "policy" / "weights"
    pool.run(mesh, save_megatron, path=models[model], weights=weights, **mesh.config)
    check_converted(step, models[model])
