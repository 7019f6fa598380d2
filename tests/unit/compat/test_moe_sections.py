"""NeMo-RL's keys of routers are `policy.moe`, or refused with what to write."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.compat.moe_sections import translate_expert_parallel, translate_routers
from nemo_rl.compat.tables import Report

QUIET = {"freeze_moe_router": False, "moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.0}
SET = {"freeze_moe_router": True, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}


def translated(model: str, **section: Any) -> tuple[dict[str, Any], Report]:
    config = {"policy": {"model_name": model, "megatron_cfg": {"enabled": True, **section}}}
    notes = Report(release="main")
    translate_routers(config, notes)
    return config["policy"], notes


def model_directory(tmp_path: Path, **values: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


@pytest.mark.parametrize("is_here", [True, False])
def test_routers_of_experts_are_set_in_policy_moe(tmp_path: Path, is_here: bool) -> None:
    here = model_directory(tmp_path, model_type="deepseek_v3", n_routed_experts=8)
    sizes = {} if is_here else {"expert_model_parallel_size": 8}
    policy, notes = translated(here if is_here else "org/absent", moe_router_bias_update_rate=1e-3, **SET, **sizes)
    assert policy["moe"] == {"freeze_router": True, "aux_loss_coeff": 1e-3, "bias_update_rate": 1e-3}
    assert notes.problems == []
    assert policy["megatron_cfg"] == {"enabled": True, **sizes}
    assert "moe" not in translated(here, **QUIET)[0]


def test_keys_of_a_dense_models_recipe_are_left_to_the_table(tmp_path: Path) -> None:
    policy, notes = translated(model_directory(tmp_path, model_type="qwen2"), **SET)
    assert policy["megatron_cfg"] == {"enabled": True, **SET}
    assert "moe" not in policy
    assert notes.problems == []


@pytest.mark.parametrize(
    ("section", "key", "problem"),
    [
        ({"moe_router_load_balancing_type": "aux_loss"}, "load_balancing_type", "write policy.moe.aux_loss_coeff"),
        (
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
            "load_balancing_type",
            "over whole batches",
        ),
        (
            {"moe_router_bias_update_rate": 1e-3, "moe_router_enable_expert_bias": True},
            "enable_expert_bias",
            "only routers of deepseek_v3, glm4_moe, nemotron_h have a bias",
        ),
    ],
)
def test_another_balance_is_refused(tmp_path: Path, section: dict[str, Any], key: str, problem: str) -> None:
    _, notes = translated(model_directory(tmp_path, model_type="qwen3_moe", num_experts=8), **section)
    assert [one.key for one in notes.problems] == [f"policy.megatron_cfg.moe_router_{key}"]
    assert problem in notes.problems[0].problem


@pytest.mark.parametrize("is_here", [True, False])
def test_a_rate_without_a_bias_asks_for_nothing(tmp_path: Path, is_here: bool) -> None:
    here = model_directory(tmp_path, model_type="qwen3_moe", num_experts=8)
    policy, notes = translated(here if is_here else "Qwen/Qwen3-30B-A3B", moe_router_bias_update_rate=1e-3)
    assert "moe" not in policy
    assert notes.problems == []
    policy, _ = translated("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", moe_router_bias_update_rate=1e-3)
    assert policy["moe"] == {"bias_update_rate": 1e-3}


@pytest.mark.parametrize(
    ("model_type", "kept"), [("qwen3_moe", True), ("gpt_oss", True), ("glm4_moe", False), (None, True)]
)
def test_experts_are_spread_where_their_kind_can_be(tmp_path: Path, model_type: str | None, kept: bool) -> None:
    """A model that is not here is checked once its config.json is."""
    name = "org/absent" if model_type is None else model_directory(tmp_path, model_type=model_type)
    config = {"policy": {"model_name": name, "dtensor_cfg": {"expert_parallel_size": 8}}}
    notes = Report(release="main")
    translate_expert_parallel(config, notes)
    assert config["policy"]["dtensor_cfg"] == ({"expert_parallel_size": 8} if kept else {})
    assert ("sharded by FSDP2" in str(notes.switches)) is not kept
