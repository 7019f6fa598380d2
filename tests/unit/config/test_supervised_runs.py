"""Recipes of supervised training: NeMo-RL's keys, and what is refused before a model loads."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.config.layout_planner import make_policy_layout
from nemo_rl.config.loading import load_dpo_config, load_reward_model_config, load_sft_config, resolved_yaml
from nemo_rl.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"

NEMO_RL: dict[str, Any] = {
    "sft": {
        "max_num_epochs": 1, "max_num_steps": 60, "val_period": 10, "val_batches": 8, "val_global_batch_size": 32,
        "val_micro_batch_size": 1, "val_at_start": True, "seed": 42,
    },
    "checkpointing": {
        "enabled": True, "metric_name": "val:val_loss", "higher_is_better": False, "keep_top_k": 3, "save_period": 10,
    },
    "policy": {
        "model_name": "meta-llama/Llama-3.2-1B", "train_global_batch_size": 32, "train_micro_batch_size": 1,
        "max_total_sequence_length": 1024, "make_sequence_length_divisible_by": 1,
        "dtensor_cfg": {"enabled": True, "sequence_parallel": False},
        "generation": {"max_new_tokens": 8},
    },
    "data": {
        "add_bos": True, "add_eos": True, "add_generation_prompt": False, "shuffle": True, "num_workers": 1,
        "max_input_seq_length": "${policy.max_total_sequence_length}",
        "train": {"dataset_name": "openai_format", "data_path": "chats.jsonl", "chat_key": "messages"},
        "validation": {"dataset_name": "openai_format", "data_path": "held_out.jsonl"},
    },
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "held_out.jsonl"):
        (tmp_path / name).touch()
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(NEMO_RL))
    return path


def test_a_recipe_of_nemo_rl_is_read(recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = load_sft_config(recipe)
    assert config.sft.val_micro_batch_size == config.val_micro_batch_size == 1
    assert config.checkpointing.metric_name == "val:loss"
    assert config.max_tokens == 1024
    assert [each.dataset_name for _, each in config.data.datasets] == ["jsonl", "jsonl"]
    assert "read as a recipe of NeMo-RL 0.6" in caplog.text
    assert not config.sft.val_at_end


@pytest.mark.parametrize(
    ("recipe_name", "load"),
    [
        ("sft_tulu3.yaml", load_sft_config),
        ("sft_quickstart.yaml", load_sft_config),
        ("dpo_quickstart.yaml", load_dpo_config),
        ("rm_quickstart.yaml", load_reward_model_config),
    ],
)
def test_what_is_shown_reads_as_the_same(recipe_name: str, load: Callable[..., Any], tmp_path: Path) -> None:
    config = load(CONFIGS / recipe_name)
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load(tmp_path / "again.yaml") == config
    assert "generation:" not in resolved_yaml(config)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("policy.train_micro_batch_size=5", r"train_micro_batch_size = 5: must divide"),
        ("data.train.data_path=none.jsonl", r"data\.train\.data_path = 'none\.jsonl': no such file"),
        ("++data.train.agent_name=a", r"data\.train\.agent_name = 'a': supervised training does not read it"),
        ("++data.overlong=cut", r"data\.overlong"),
        ("data.train.dataset_name=nemo_gym", r"data\.train\.dataset_name = 'nemo_gym': .*tasks of agents"),
        ("checkpointing.metric_name=val:accuracy", r"no such metric"),
        ("checkpointing.higher_is_better=true", r"val:loss is better when it is lower"),
        ("++sft.max_steps=3", r"unknown key; did you mean sft\.max_num_steps"),
        ("++policy.device=cpu ++policy.dtensor_cfg.data_parallel_size=3", r"multiple of the 3 data parallel ranks"),
    ],
)
def test_what_cannot_run_is_refused(override: str, problem: str, recipe: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_sft_config(recipe, override.split())


def test_ranks_stand_alone_on_all_of_the_cluster(recipe: Path) -> None:
    config = load_sft_config(recipe, ["++cluster.gpus_per_node=2", "++cluster.num_nodes=2"])
    layout = make_policy_layout(config.policy, config.cluster, "cuda")
    assert [(place.node, place.gpus) for place in layout.ranks] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert layout.engines == ()
    assert not make_policy_layout(
        config.policy, config.cluster.model_copy(update={"num_nodes": 1}), "cpu"
    ).needs_cluster


SMALLEST = """
policy: {model_name: m}
data: {train: {dataset_name: spell_backward}}
"""


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("rm.max_num_step=3", "rm.max_num_step", "did you mean rm.max_num_steps"),
        ("grpo.max_num_steps=3", "grpo", "unknown key"),
        ("++policy.optimizer.kwargs=3", "policy.optimizer.kwargs", "must be a mapping"),
        ("policy.train_micro_batch_size=48", "policy.train_micro_batch_size", "must divide .* = 64"),
        ("data.train.dataset_name=jsonl", "data.train.data_path", "required"),
        ("data.train={dataset_name: jsonl, data_path: absent.jsonl}", "data.train.data_path", "no such file"),
        ("data.train.dataset_name=spel_backward", "data.train.dataset_name", "spell_backward"),
        ("rm.val_period=-2", "rm.val_period", "greater than or equal to 0"),
        ("++policy.precision=float16", "policy.precision", "bfloat16"),
        ("++checkpointing.metric_name=val:loss", "checkpointing.metric_name", "needs a dataset in data.validation"),
        ("++data.train.env_name=math", "data.train.env_name", "supervised training does not read it"),
        ("++data.train.output_key=a", "data.train.output_key", "training on pairs does not read it"),
    ],
)
def test_bad_input_is_refused_by_its_key(tmp_path: Path, override: str, key: str, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALLEST)
    with pytest.raises(ConfigError, match=said) as caught:
        load_reward_model_config(recipe, [override])
    assert caught.value.key == key


DPO = """
policy: {model_name: m, max_total_sequence_length: 64}
data: {train: {dataset_name: spell_backward}}
"""


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ("++dpo.beta=0.1", "dpo.beta", "unknown key"),
        ("++dpo.reference_policy_kl_penalty=0", "dpo.reference_policy_kl_penalty", "greater than 0"),
        ("++dpo.preference_loss_weight=0", "dpo.preference_loss_weight", "there is no loss"),
        (
            "++policy.sequence_packing={enabled: true, train_mb_tokens: 100}",
            "policy.sequence_packing.train_mb_tokens",
            "at least 128 tokens",
        ),
        (
            "++policy.dynamic_batching={enabled: true, train_mb_tokens: 128, sequence_length_round: 48}",
            "policy.dynamic_batching.train_mb_tokens",
            "at least 192 tokens",
        ),
        (
            "++policy.dynamic_batching.enabled=true ++policy.train_micro_batch_size=1",
            "policy.dynamic_batching.train_mb_tokens",
            "two answers of a pair are trained together",
        ),
        (
            "++policy.sequence_packing={enabled: true, train_mb_tokens: 128, share_prefixes: true}",
            "policy.sequence_packing.share_prefixes",
            "allowed: false",
        ),
        ("++policy.router_replay.enabled=true", "policy.router_replay.enabled", "no engine samples"),
        ("++data.train.output_key=a", "data.train.output_key", "training on pairs does not read it"),
        ("++data.max_input_seq_length=65", "data.max_input_seq_length", "at most policy.max_total"),
        ("data.train.dataset_name=nemo_gym", "data.train.dataset_name", "tasks of agents"),
    ],
)
def test_what_dpo_cannot_run_is_refused(overrides: str, key: str, said: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DPO)
    with pytest.raises(ConfigError, match=said) as caught:
        load_dpo_config(recipe, re.split(r" (?=\+\+)", overrides))
    assert caught.value.key == key


def test_pair_keys_belong_to_pairs(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.chosen_key = 'a': training on conversations does not read it"):
        load_sft_config(recipe, ["++data.train.chosen_key=a"])


def test_accuracy_and_sums_may_rank_checkpoints_of_dpo(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DPO + "checkpointing: {enabled: true, metric_name: 'val:accuracy'}\n")
    held_out = "++data.validation={dataset_name: spell_backward, split: validation}"
    assert load_dpo_config(recipe, [held_out]).checkpointing.metric_name == "val:accuracy"
    with pytest.raises(ConfigError, match=r"better when it is lower"):
        load_dpo_config(recipe, [held_out, "++checkpointing.metric_name=val:preference_loss"])
