"""Sections of NeMo-RL's recipes with another shape here: `env`, `data`, and models that Megatron does not map."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.compat import data_sections, environment_sections, megatron_models, translation
from nemo_rl.compat.tables import Report
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.megatron.optimizer_keys import to_torch_config
from tests.unit.policy.tiny import learning_rates


def report(*, allow: bool = False) -> Report:
    return Report(allow, release="main")


def environments(config: dict[str, Any]) -> Report:
    notes = report()
    environment_sections.translate_environments(config, notes)
    return notes


@pytest.mark.parametrize("is_named", [True, False])
def test_an_unknown_environment_is_refused_with_the_lines_to_write(is_named: bool) -> None:
    data = {"train": {"dataset_name": "x"}, "default": {"env_name": "mine" if is_named else "math"}}
    (problem,) = environments({"env": {"math": {}, "mine": {"steps": 3}}, "data": data}).problems
    assert "write env.mine.type: <dotted path" in problem.problem
    assert ("data.default.env_name: mine" in problem.problem) is not is_named


def test_a_class_of_a_users_own_gets_its_section_as_cfg() -> None:
    config = {
        "env": {"mine": {"type": "pkg.Env", "steps": 3, "timeout_s": 9}, "other": {"type": "p.E", "cfg": {"a": 1}}}
    }
    assert environments(config).problems == []
    assert config["env"] == {
        "mine": {"type": "pkg.Env", "timeout_s": 9, "kwargs": {"cfg": {"steps": 3}}},
        "other": {"type": "p.E", "kwargs": {"cfg": {"a": 1}}},
    }


def test_the_puzzles_boards_take_the_place_of_the_recipes_data() -> None:
    config: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 4, "max_num_steps": 5, "max_val_samples": 3},
        "env": {
            "math": {},
            "sliding_puzzle_game": {"cfg": {"game_config": {"size": 4, "shuffle_moves": 6}, "max_moves": 9}},
        },
        "data": {"shuffle": False, "train": {"dataset_name": "OpenMathInstruct-2"}, "default": {"env_name": "math"}},
        "policy": {"generation": {"stop_strings": None}},
    }
    notes = environments(config)
    assert notes.problems == []
    assert "its boards take the place of data.train" in notes.notes[0]
    assert config["env"]["sliding_puzzle_game"] == {"type": "sliding_puzzle", "max_moves": 9}
    train, held_out = config["data"]["train"], config["data"]["validation"]
    assert (train["size"], held_out["size"]) == (20, 3)
    assert train["env_name"] == held_out["env_name"] == "sliding_puzzle_game"
    assert train["task_kwargs"] == {"size": [2, 4], "shuffle_moves": [1, 6]}
    assert config["data"]["default"] == {}
    assert config["policy"]["generation"]["stop_strings"] == ["</action>"]


def test_a_puzzle_without_a_game_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"env\.sliding_puzzle_game\.cfg\.game_config"):
        environments({"env": {"sliding_puzzle_game": {}}, "grpo": {}})


def test_a_flat_validation_file_is_read_like_the_training_file() -> None:
    config = {
        "data": {
            "dataset_name": "ResponseDataset", "train_data_path": "t.jsonl", "val_data_path": "v.jsonl",
            "input_key": "q", "output_key": "a", "subset": "s", "chat_key": "messages",
        }
    }  # fmt: skip
    data_sections.spread_flat_data(config)
    assert config["data"]["validation"] == {
        "dataset_name": "ResponseDataset", "subset": "s", "input_key": "q", "output_key": "a",
    }  # fmt: skip
    assert config["data"]["default"] == {"chat_key": "messages"}


def loaders(**data: Any) -> tuple[dict[str, Any], Report]:
    config: dict[str, Any] = {"grpo": {"max_num_epochs": 1}, "data": {"train": [{}, {}], **data}}
    notes = report()
    data_sections.translate_loaders(config, notes)
    return config, notes


def test_a_loader_per_dataset_is_a_mix_that_only_its_steps_end() -> None:
    path = "examples.custom_dataloader.custom_dataloader.example_custom_dataloader"
    config, notes = loaders(use_multiple_dataloader=True, num_prompts_per_dataloader=16, custom_dataloader=path)
    assert notes.problems == []
    assert config["data"] == {"train": [{}, {}], "train_mix": [16, 16]}
    assert config["grpo"]["max_num_epochs"] > 1000
    config, notes = loaders(use_multiple_dataloader=False, num_prompts_per_dataloader=16, custom_dataloader=path)
    assert config["data"] == {"train": [{}, {}]}
    assert "data.custom_dataloader" in str(notes.switches)


def test_a_loader_of_a_users_own_is_refused_with_the_key_to_write() -> None:
    _, notes = loaders(use_multiple_dataloader=True, num_prompts_per_dataloader=16, custom_dataloader="mine.choose")
    assert "data.train_mix" in notes.problems[0].problem


def model_directory(tmp_path: Path, model_type: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(tmp_path)


def megatron(model: str, **section: Any) -> dict[str, Any]:
    optimizer = {"lr": 2e-6, "min_lr": 2e-7, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95}
    return {"policy": {"model_name": model, "megatron_cfg": {"enabled": True, "optimizer": optimizer, **section}}}


def train_elsewhere(config: dict[str, Any], notes: Report) -> None:
    unmapped = megatron_models.find_unmapped(config)
    section = config["policy"]["megatron_cfg"]
    for key in [key for key in section if key.startswith(("moe_", "freeze_", "expert_"))]:
        del section[key]  # as the table does between the two
    megatron_models.train_elsewhere(unmapped, notes)


def test_a_model_that_megatron_maps_stays_with_it(tmp_path: Path) -> None:
    config = megatron(model_directory(tmp_path, "qwen2"))
    before, notes = copy.deepcopy(config), report(allow=True)
    train_elsewhere(config, notes)
    assert config == before
    assert notes.lines() == []


def test_config_json_tells_that_a_model_is_not_mapped(tmp_path: Path) -> None:
    notes = report()
    train_elsewhere(megatron(model_directory(tmp_path, "gpt_oss")), notes)
    (problem,) = notes.problems
    assert problem.key == "policy.megatron_cfg.enabled"
    assert "mixtral, glm4_moe; write policy.megatron_cfg.enabled: false" in problem.problem


@pytest.mark.parametrize(
    ("name", "is_mapped"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", True),
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("zai-org/GLM-4.5-Air", True),
        ("nemo_rl/quickstart-moe-3", True),
        ("zai-org/GLM-4.5V", False),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", False),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", False),
    ],
)
def test_the_hubs_name_tells_of_models_that_are_not_here(name: str, is_mapped: bool) -> None:
    found = megatron_models.find_unmapped(megatron(name, expert_model_parallel_size=8))
    assert [one.key for one in found] == ([] if is_mapped else ["policy"])


def test_experts_are_trained_by_fsdp2_where_a_layout_may_change() -> None:
    experts = {"expert_model_parallel_size": 8, "moe_router_load_balancing_type": "none"}
    config, notes = megatron("org/absent", activation_checkpointing=True, **experts), report(allow=True)
    train_elsewhere(config, notes)
    assert notes.problems == []
    policy = config["policy"]
    assert policy["dtensor_cfg"] == {"activation_checkpointing": True}
    assert policy["optimizer"]["kwargs"] == {"lr": 2e-6, "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-8}
    assert "megatron_cfg" not in policy
    assert "Megatron does not map org/absent, so FSDP2 trains it" in notes.notes[0]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_schedule_of_a_switched_model_is_megatrons(style: str, warmup: int) -> None:
    schedule = {"lr_warmup_iters": warmup, "lr_warmup_init": 2e-7, "lr_decay_style": style, "lr_decay_iters": 9}
    config = megatron("org/absent", expert_model_parallel_size=8, scheduler=schedule)
    section = {"enabled": True, "optimizer": config["policy"]["megatron_cfg"]["optimizer"], "scheduler": schedule}
    theirs = to_torch_config(PolicyConfig.model_validate({"model_name": "m", "megatron_cfg": section}))
    train_elsewhere(config, report(allow=True))
    ours = PolicyConfig.model_validate(
        {"model_name": "m"} | {k: config["policy"][k] for k in ("optimizer", "scheduler")}
    )
    assert learning_rates(ours, 14) == pytest.approx(learning_rates(theirs, 14), rel=1e-6)


@pytest.mark.parametrize(
    ("colocated", "gpus"),
    [({"enabled": True}, 8), ({"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}}, 4)],
)
def test_an_engine_is_cut_to_the_gpus_of_a_node_on_request(colocated: dict[str, Any], gpus: int) -> None:
    def recipe(size: int) -> dict[str, Any]:
        engine = {"tensor_parallel_size": size}
        generation = {"colocated": colocated, "vllm_cfg": engine}
        return {"policy": {"generation": generation}, "cluster": {"gpus_per_node": 8, "num_nodes": 2}}

    cut, kept = recipe(16), recipe(gpus)
    translation._translate_engine(cut, allowed := report(allow=True))
    translation._translate_engine(kept, allowed)
    assert cut == kept == recipe(gpus)
    assert allowed.problems == []
    translation._translate_engine(recipe(16), refused := report())
    assert [(error.key, error.value) for error in refused.problems] == [
        ("policy.generation.vllm_cfg.tensor_parallel_size", 16)
    ]
