"""Ten recipes in the shapes of NeMo-RL's releases train two steps with a tiny model.

Each equals the same run of a recipe written by hand in this project's terms.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from nemo_rl.config import loading
from nemo_rl.launch.reward_model_training import train_reward_model
from nemo_rl.launch.supervised_training import run_supervised
from nemo_rl.launch.training import run_training
from tests.functional.cli import ROOT
from tests.support.quick import quick

pytestmark = pytest.mark.timeout(900)
DIRECTORY = ROOT / "tests" / "compat" / "recipes"
OWN = ROOT / "tests" / "compat" / "own"  # the same recipes in this project's terms, written by hand
RECIPES = [  # every algorithm, and every release several times
    *("main/grpo", "main/async", "main/distillation"),
    *("0.7/gspo", "0.7/grpo_context_parallel", "0.7/rm"),
    *("0.6/top_p", "0.6/sft"),
    *("0.5/grpo", "0.5/dpo"),
]
LOADERS: dict[str, Any] = {
    "distillation": loading.load_distillation_config,
    "dpo": loading.load_dpo_config,
    "rm": loading.load_reward_model_config,
    "sft": loading.load_sft_config,
}
COMPARED = ("train/loss", "train/grad_norm", "train/reward", "train/accuracy")


def letters(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    """The share of letters in the response."""
    text = messages[-1]["content"]
    return sum(character.isalpha() for character in text) / max(len(text), 1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with conversations and pairs on the same words."""
    directory = tmp_path_factory.mktemp("data")
    words = [f"{first}{second}t" for first in "abcdefgh" for second in "aeiou"]
    chat = [[{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}] for word in words]
    pairs = [{"prompt": word, "chosen": word[::-1], "rejected": word} for word in words]
    for name, lines in (("chat", [{"messages": one} for one in chat]), ("pairs", pairs)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def data_overrides(family: str, rows: Path, *, flat: bool = False) -> list[str]:
    """Return the data of a run; `flat` is the section of 0.5."""
    are_pairs, has_tasks = family in ("dpo", "rm"), family in ("grpo", "distillation")
    path = rows / ("pairs.jsonl" if are_pairs else "chat.jsonl")
    if flat:
        name = "PreferenceDataset" if are_pairs else "ResponseDataset"
        task = ["data.env_name=letters"] if has_tasks else []
        return [f"data.dataset_name={name}", f"++data.train_data_path='{path}'", *task]
    train = f"{{dataset_name: jsonl, data_path: '{path}', split: null, seed: null, split_validation_size: null}}"
    task = ["data.default={env_name: letters}"] if has_tasks else []
    return [f"data={{train: {train}, validation: null}}", *task]


def overrides(family: str, model: Path, rows: Path) -> list[str]:
    """Return what makes a recipe small: the model, the sizes and a CPU."""
    shared = [
        f"policy.model_name={model}",
        "~policy.tokenizer",
        "++policy.device=cpu",
        "policy.precision=float32",
        "policy.max_total_sequence_length=48",
        "++logger.wandb_enabled=false",
        "++logger.tensorboard_enabled=false",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        f"{family}.max_num_steps=2",
        f"{family}.val_period=0",
        f"++{family}.val_at_start=false",
    ]
    if family == "rm":
        return [*shared, "~checkpointing.metric_name", f"checkpointing.checkpoint_dir={rows / 'rm'}"]
    shared += ["++policy.dtensor_cfg.tensor_parallel_size=1", "checkpointing.enabled=false"]
    shared += ["++cluster.gpus_per_node=1", "++cluster.num_nodes=1"]
    if family in ("sft", "dpo"):
        return shared
    sampled = [
        "policy.generation.backend=hf",
        "policy.generation.max_new_tokens=8",
        "~policy.generation.vllm_cfg",
        f"{family}.num_prompts_per_step=4",
        f"{family}.num_generations_per_prompt=2",
        f"env={{letters: {{type: '{__name__}:letters'}}}}",
    ]
    teacher = [f"teacher.model_name={model}", f"++teacher.tokenizer.name={model}"]
    return [*shared, *sampled, *(teacher if family == "distillation" else [])]


def train(path: Path, family: str, arguments: list[str]) -> dict[int, dict[str, float]]:
    """Return the metrics of each step that do not depend on the time."""
    config = LOADERS.get(family, loading.load_config)(path, arguments)
    if family == "rm":
        train_reward_model(config)
    else:
        asyncio.run((run_supervised if family in ("sft", "dpo") else run_training)(config, "a test"))
    (metrics,) = Path(config.logger.log_dir).glob("exp_*/metrics.jsonl")
    steps: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        step = steps.setdefault(row.pop("step"), {})
        step |= {name: value for name, value in row.items() if name in COMPARED}
    return {step: values for step, values in steps.items() if values}


@pytest.mark.parametrize("name", quick(RECIPES, ["main/grpo", "main/distillation", "0.7/rm", "0.6/sft", "0.5/dpo"]))
def test_two_steps_equal_those_of_the_recipe_in_our_terms(name: str, fresh: Path, rows: Path, tmp_path: Path) -> None:
    path = DIRECTORY / f"{name}.yaml"
    family = path.stem if path.stem in LOADERS else "grpo"
    arguments = overrides(family, fresh, rows)
    data = data_overrides(family, rows, flat=path.parent.name == "0.5")
    theirs = train(path, family, [*arguments, *data, f"++logger.log_dir={tmp_path / 'theirs'}"])
    assert sorted(theirs) == [1, 2]
    assert all({"train/loss", "train/grad_norm"} <= values.keys() for values in theirs.values())
    written = [*arguments, *data_overrides(family, rows), f"++logger.log_dir={tmp_path / 'ours'}"]
    assert train(OWN / path.name, family, written) == theirs


def test_experts_of_a_megatron_recipe_train_by_fsdp2_with_frozen_routers(
    fresh: Path, rows: Path, tmp_path: Path
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(fresh), tmp_path / "experts"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "first_k_dense_replace": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **ranks, **experts, **tokens)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arguments = [*overrides("sft", model, rows), *data_overrides("sft", rows), f"++logger.log_dir={tmp_path}"]
    arguments += ["checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.metric_name=null"]
    megatron = "{enabled: true, expert_model_parallel_size: 2, freeze_moe_router: true, optimizer: {lr: 0.01}}"
    arguments += [f"checkpointing.checkpoint_dir={tmp_path / 'saved'}", f"++policy.megatron_cfg={megatron}"]
    config = loading.load_sft_config(DIRECTORY / "main" / "sft.yaml", arguments, allow_unsupported=True)
    asyncio.run(run_supervised(config, "a test"))
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "step_2" / "policy" / "weights").state_dict()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    routers = {name for name in before if name.endswith(".mlp.gate.weight")}
    assert len(routers) == 2
    assert not changed & routers
    assert any(".mlp.experts." in name for name in changed)
